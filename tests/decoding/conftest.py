"""Shared by tests of decoding."""

import pytest


@pytest.fixture(params=[1, 3])
def threads(request, set_threads):
    """The number of threads, which is set."""
    set_threads(request.param)
    return request.param
