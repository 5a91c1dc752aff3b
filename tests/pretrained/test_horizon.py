"""The shipped model opens, does what its card says, and behaves like any other model."""

import re

import pytest
import torch

from recurra import pretrained
from recurra.data.memory_horizon import memory_horizon_targets
from recurra.pretrained import _HorizonModel, memory_horizon


@pytest.fixture(scope="module")
def shipped() -> _HorizonModel:
    return memory_horizon()


def stated(card: str, row: str) -> float:
    return float(re.search(rf"^\| {row} \| ([\d.]+) \|$", card, flags=re.MULTILINE)[1])


def test_the_wheel_stays_small():
    assert pretrained._WEIGHTS.stat().st_size < 1_000_000


def test_it_reaches_what_its_card_says(shipped):
    assert shipped.accuracy() == pytest.approx(stated(shipped.card, "all steps"), abs=0.0015)
    assert f"{sum(p.numel() for p in shipped.model.parameters()):,} parameters" in shipped.card
    assert f"{shipped.step:,} updates" in shipped.card


def test_its_accuracy_by_span_is_the_card_s(shipped):
    places = shipped.data.places("test")
    with torch.no_grad():
        right = shipped.model(shipped.data.tokens[places])[0].argmax(-1) == shipped.data.targets[places]
    spans = shipped.data.spans("test")
    for first, last in [(0, 3), (4, 7), (8, 15), (16, 31), (32, 63)]:
        share = right[(spans >= first) & (spans <= last)].double().mean().item()
        assert share == pytest.approx(stated(shipped.card, f"{first} to {last}"), abs=0.003)


def test_its_gates_close_at_resets_and_only_there(shipped):
    contrast = shipped.reset_contrast()
    assert contrast.at_resets.max() < 0.15
    assert contrast.elsewhere.min() > 0.7


@pytest.mark.parametrize("tokens", [[2, 3, 4], [2, 3, 4, 1], [5], [1, 1, 1, 5, 3]])
def test_it_answers_short_questions(shipped, tokens):
    assert shipped.answer(tokens) == memory_horizon_targets(torch.tensor([tokens]))[0, -1]


def test_gates_are_drawn(shipped, tmp_path):
    files = shipped.draw_gates(tmp_path / "figures")
    assert [file.name for file in files] == [
        f"gate-{name}.{suffix}" for name in ("magnitudes", "phases") for suffix in ("png", "svg")
    ]
    assert all(file.stat().st_size for file in files)
