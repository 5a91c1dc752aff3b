"""Tokens are chosen on the CPU, whatever device torch makes tensors on by default."""

import pytest
import torch

from recurra.streams.continuation import GenerationConfig
from recurra.streams.sampling import SamplingConfig, TokenChoice, choose
from recurra.streams.speculation import Speculation
from recurra.streams.stream import Stream, Streams

from .conftest import VOCABULARY

SETTINGS = [
    SamplingConfig(repetition_penalty=1.3, top_k=9, top_p=0.9, min_p=0.01),
    SamplingConfig(temperature=0.0, repetition_penalty=1.3),
    SamplingConfig(),
]


@pytest.fixture
def elsewhere():
    """A default device on which numbers have no values."""
    return torch.device("meta")


@pytest.mark.parametrize("backend", ["numba", "reference"])
def test_rows_choose_the_same_tokens(backend, elsewhere):
    logits = torch.randn(len(SETTINGS), VOCABULARY)

    def chosen():
        rows = [TokenChoice(one, torch.Generator().manual_seed(number), (1, 2)) for number, one in enumerate(SETTINGS)]
        return choose(logits, rows, backend=backend)

    expected = chosen()
    with elsewhere:
        assert chosen() == expected


@pytest.mark.parametrize("sampling", SETTINGS)
def test_streams_continue_the_same(gateloop, sampling, elsewhere, tmp_path):
    def continued():
        streams = Streams(gateloop)
        streams.open("a").feed([1, 2, 3])
        streams.open("b").feed(torch.tensor([4], device="cpu"))
        config = GenerationConfig(max_tokens=6, sampling=sampling)
        tokens = list(streams.generate({"a": config, "b": config}))
        streams["a"].save(tmp_path / "a.safetensors")
        return tokens, (tmp_path / "a.safetensors").read_bytes()

    expected = continued()
    with elsewhere:
        assert continued() == expected


@pytest.mark.parametrize("sampling", SETTINGS)
def test_drafts_are_accepted_the_same(gateloop, sampling, elsewhere):
    def continued():
        speculation = Speculation(Stream(gateloop), Stream(gateloop), n_drafted=3)
        speculation.feed([1, 2, 3])
        return list(speculation.generate(12, sampling=sampling)), speculation.drafts

    expected = continued()
    with elsewhere:
        assert continued() == expected
