"""Bad input to the delta rule: each error names the argument, what came and what was expected."""

import pytest
import torch

from recurra import delta_rule

ones = torch.ones
SHAPES = {
    "q": (2, 5, 3, 4), "k": (2, 5, 3, 4), "v": (2, 5, 3, 6), "a": (2, 5, 3), "b": (2, 5, 3, 1), "state": (2, 3, 4, 6),
}  # fmt: skip


def arguments(**changes):
    return {name: torch.ones(shape) for name, shape in SHAPES.items()} | changes


BAD_INPUT = [
    ("mode", "fast", ValueError, "mode is 'fast'; expected one of auto, recurrent, chunk"),
    ("q", ones(2, 5), ValueError, r"q is float32 \(2, 5\) on cpu; expected \(B, L, H, d\)"),
    ("k", ones(2, 5, 3, 6), ValueError, r"k is .*; expected \(2, 5, 3, 4\)"),
    ("v", ones(2, 4, 3, 6), ValueError, r"v is .*; expected \(2, 5, 3, 6\)"),
    ("a", ones(2, 5, 3, 6), ValueError, r"a is .*; expected \(2, 5, 3\) or \(2, 5, 3, 1\) or \(2, 5, 3, 4\)"),
    ("b", ones(2, 5, 1), ValueError, r"b is .*; expected \(2, 5, 3\) or \(2, 5, 3, 1\)"),
    ("state", ones(2, 3, 6, 4), ValueError, r"state is .*; expected \(2, 3, 4, 6\)"),
]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("name", "bad", "kind", "message"), BAD_INPUT)
def test_bad_input(name, bad, kind, message):
    with pytest.raises(kind, match=message):
        delta_rule(**arguments(**{name: bad}))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("name", SHAPES)
def test_what_holds_for_every_argument(name):
    good = arguments()
    assert delta_rule(**good)[0].shape == SHAPES["v"]
    for bad, kind in (([1.0], TypeError), (good[name].long(), TypeError), (good[name] + 0j, TypeError)):
        with pytest.raises(kind, match=f"{name} is .*; expected"):
            delta_rule(**good | {name: bad})
    if name != "q":
        with pytest.raises(ValueError, match=f"{name} is .* on meta; expected a tensor on cpu, as q"):
            delta_rule(**good | {name: good[name].to("meta")})
