"""Shared by tests of decoding."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.no_grad():
        yield


@pytest.fixture(params=[1, 3])
def threads(request, set_threads):
    """The number of threads, which is set."""
    set_threads(request.param)
    return request.param
