"""The explorer's page on published hybrids: the gates of their recurrent layers, and a state that grows."""

import re

import pytest
import torch
from tests.serve.conftest import Running
from tests.serve.test_converted import LAYERS, TEXT, Converted
from tests.web.explorer import gate_colours, open_explorer, pane, read, wait_for, wait_until_drawn

from recurra.serve._http import ServeSettings
from recurra.serve._service import Service
from recurra.state import n_bytes


@torch.no_grad()
def first_gates(model: Converted, tokens: list[int]) -> torch.Tensor:
    """|a| of every channel that the first layer shows: the decay, and for the delta rule also that along the key."""
    decays = model.decays(tokens)
    if model.family == "granite":
        return decays
    block = model.peer.model.layers[0]
    x = block.input_layernorm(model.peer.model.embed_tokens(torch.tensor(tokens)) * model.multiplier)
    return torch.cat([decays, decays * (1 - torch.sigmoid(block.linear_attn.in_proj_b(x)))], -1)


@pytest.mark.parametrize(("family", "weights"), [("qwen", "float32"), ("granite", "float32"), ("granite", "int8")])
def test_gates_and_memory(family, weights, tmp_path, page):
    model = Converted(family, weights, {}, tmp_path)
    tokens = model.served.encode(TEXT, is_first=True)
    with Running(Service([model.served], ServeSettings(), threads=1)) as running:
        open_explorer(page, running.url)
        read(page, TEXT)
        wait_for(page, len(tokens))
        assert gate_colours(page) > 20
        assert f" of {len(LAYERS[family])} layers " in page.get_attribute(f"{pane()} .gates-canvas", "aria-label")
        states = model.served.read(torch.tensor([tokens]), [model.served.start.model_state])[1]
        number, unit = page.inner_text(f"{pane()} .of-state dd").split()
        assert page.inner_text(f"{pane()} .of-state dt") == "state"  # not a constant one: its attention layers remember
        assert float(number) * {"B": 1, "kB": 1e3}[unit] == pytest.approx(n_bytes(states[0]), rel=0.02)
        for place in (0, 7, len(tokens) - 1):
            page.click(f"{pane()} .token >> nth={place}")
            wait_until_drawn(page)
            means = re.findall(r"\d\.\d\d", page.inner_text(f"{pane()} .gates"))[-len(LAYERS[family]) :]
            expected = float(first_gates(model, tokens)[place].mean())
            assert float(means[0]) == pytest.approx(expected, abs=0.01 if weights == "float32" else 0.05)
        page.goto("about:blank")
