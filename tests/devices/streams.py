"""Streams on another device write what they write on the CPU, and go on from what was saved there."""

import copy
from pathlib import Path

import torch
from tests.devices.elsewhere import DEVICE, NAME
from tests.streams.conftest import build
from torch import nn

from recurra.state import tensors
from recurra.streams.continuation import GenerationConfig
from recurra.streams.sampling import SamplingConfig
from recurra.streams.speculation import Speculation
from recurra.streams.stream import Stream, Streams

PROMPT = [3, 1, 4, 1, 5, 9]
SAMPLING = SamplingConfig(temperature=0.8, top_k=9, repetition_penalty=1.2)


def written(model: nn.Module, draft: nn.Module, folder: Path) -> list[list[int]]:
    """What a stream writes alone, after it was saved and loaded, beside others, and with drafts."""
    stream = Stream(model)
    stream.feed(PROMPT)
    found = [list(stream.generate(9, sampling=SAMPLING, seed=5))]
    stream.save(folder / "state")
    other = Stream(model)
    other.load(folder / "state")
    assert {x.device for x in tensors(other.state)} == {next(model.parameters()).device}
    found.append(list(other.generate(3)))
    streams = Streams(model)
    for name, prompt in {"a": PROMPT, "b": PROMPT[:2]}.items():
        streams.open(name).feed(prompt)
    rounds = list(streams.generate({name: GenerationConfig(max_tokens=5, seed=3) for name in "ab"}))
    found += [[tokens[name] for tokens in rounds] for name in "ab"]
    speculation = Speculation(Stream(model), Stream(draft), n_drafted=3)
    speculation.feed(PROMPT)
    return [*found, list(speculation.generate(9, sampling=SAMPLING, seed=5))]


def check_streams(folder: Path) -> None:
    for name in ("gateloop", "transformer-xl-adaptive"):
        print(name, flush=True)
        model = build(name)
        draft = copy.deepcopy(model)
        with torch.no_grad():
            for parameter in draft.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.05)
        expected = written(model, draft, folder)
        for module in (model, draft):
            assert next(module.to(DEVICE).parameters()).device.type == NAME
        Stream(model).load(folder / "state")
        assert written(model, draft, folder) == expected, name
