"""Rows of different lengths, padded or packed, come out as each would alone; later calls go on from where they are."""

import jaxtyping
import pytest
import torch
from tests.contracts.conftest import of_each_kind

from recurra import state as states
from recurra.layers.embeddings import IGNORED_TARGET

CLOSE = {"rtol": 1e-9, "atol": 1e-10}
N_ROWS = 3


@pytest.fixture(autouse=True)
def _has_steps(case):
    if not case.takes_no_steps:
        pytest.skip("the steps of clips are whole segments, which are not padded")


def mask_of(lengths, side):
    """True at as many steps of every row as it is long; two steps at least are padding."""
    order = torch.arange(max(lengths) + 2)
    rows = []
    for length in lengths:
        places = {"left": order.flip(0), "right": order, "anywhere": torch.randperm(len(order))}[side]
        rows.append(places < length)
    return torch.stack(rows)


def draw(case, batch, length):
    x = case.draw(batch, length)
    return x.requires_grad_() if x.is_floating_point() else x


def nothing(x):
    """What may stand at padded places."""
    return torch.nan if x.is_floating_point() else IGNORED_TARGET


def start(case, module):
    """The state of a batch from earlier in a stream, with tensors that record gradients."""
    with torch.no_grad():
        _, state = module(case.draw(N_ROWS, 5))
    return states.map_tensors(lambda tensor: tensor.clone().requires_grad_(), state)


def row_of(state, row):
    return states.select(state, slice(row, row + 1))


def gradients(outputs, lasts, leaves):
    weights = torch.Generator(torch.get_default_device()).manual_seed(3)
    flat = [*outputs, *(tensor for last in lasts for tensor in states.tensors(last))]
    loss = sum((torch.randn(t.shape, generator=weights, dtype=t.dtype) * t).sum().real for t in flat)
    return torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)


def assert_rows_are_equal(module, leaves, outputs, last, expected_outputs, expected_lasts):
    lasts = states.split(last)
    for one, other in zip(outputs, expected_outputs, strict=True):
        torch.testing.assert_close(one, other, **CLOSE)
    for one, other in zip(lasts, expected_lasts, strict=True):
        assert states.layout(one) == states.layout(other)
        for x, y in zip(states.tensors(one), states.tensors(other), strict=True):
            torch.testing.assert_close(x, y, **CLOSE)
    leaves = [*leaves, *module.parameters()]
    found, expected = gradients(outputs, lasts, leaves), gradients(expected_outputs, expected_lasts, leaves)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, **CLOSE)


def test_padding_changes_no_row(case, module):
    """Three padded calls, each going on from the one before, beside every row alone in one call without padding."""
    leaves, inputs, masks, outputs, state = [], [], [], [], None
    for lengths, side in (([0, 0, 0], "left"), ([6, 0, 9], "right"), ([4, 8, 0], "anywhere")):
        mask = mask_of(lengths, side)
        x = draw(case, *mask.shape)
        padded = torch.where(mask.view(*mask.shape, *[1] * (x.dim() - 2)), x, nothing(x))
        y, state = module(padded, state, mask=mask)
        assert y.shape[:2] == mask.shape
        assert not y[~mask].any()
        leaves += [x] if x.requires_grad else []
        inputs.append(x)
        masks.append(mask)
        outputs.append(y)
    rows = [torch.cat([y[row][mask[row]] for y, mask in zip(outputs, masks)]) for row in range(N_ROWS)]
    alone = [torch.cat([x[row][mask[row]] for x, mask in zip(inputs, masks)]) for row in range(N_ROWS)]
    pairs = [module(x[None]) for x in alone]
    assert_rows_are_equal(module, leaves, rows, state, [y[0] for y, _ in pairs], [last for _, last in pairs])


def test_packed_sequences_are_run_apart(case, module):
    """Three packed calls, each going on from the one before, beside every sequence alone in one call."""
    leaves, inputs, outputs, state = [], [], [], None
    for lengths in ([0, 4, 2], [7, 3, 5], [0, 0, 0]):
        x = draw(case, 1, sum(lengths))
        borders = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        y, state = module(x, state, cu_seqlens=borders)
        assert y.shape[:2] == x.shape[:2]
        leaves += [x] if x.requires_grad else []
        inputs.append(x[0].split(lengths))
        outputs.append(y[0].split(lengths))
    pairs = [module(torch.cat(parts)[None]) for parts in zip(*inputs)]
    rows = [torch.cat(parts) for parts in zip(*outputs)]
    assert_rows_are_equal(module, leaves, rows, state, [y[0] for y, _ in pairs], [last for _, last in pairs])


def pieces_alone(module, x, cuts, state):
    """A row in pieces that begin at the cuts, of which only the first has a state, if it has a step."""
    pieces = x.tensor_split(cuts)
    pairs = [module(piece[None], None if number else state) for number, piece in enumerate(pieces)]
    return torch.cat([y[0] for y, _ in pairs]), pairs[-1][1]


def test_a_reset_is_a_cut(case, module):
    """Two calls, one going on from the other, the second with padding; a cut may be at a step that does not count."""
    entering = start(case, module)
    lengths, cuts = (8, 6), ([[3, 5], [0], []], [[], [1, 4], [2]])
    mask = torch.ones(N_ROWS, 6, dtype=torch.bool)
    mask[1, 3:5], mask[2, :3] = False, False
    leaves, outputs, state, expected, alone = [*states.tensors(entering)], [], entering, [], None
    for length, rows, counts in zip(lengths, cuts, (None, mask)):
        x = draw(case, N_ROWS, length)
        reset = torch.zeros(N_ROWS, length, dtype=torch.bool)
        for row, places in enumerate(rows):
            reset[row, places] = True
        y, state = module(x, state, reset=reset, **({} if counts is None else {"mask": counts}))
        outputs.append(y)
        leaves += [x] if x.requires_grad else []
        pairs = []
        for row, places in enumerate(rows):
            is_counted = torch.ones(length, dtype=torch.bool) if counts is None else counts[row]
            shifted = [int(is_counted[:place].sum()) for place in places]
            before = row_of(entering, row) if alone is None else alone[row]
            pairs.append(pieces_alone(module, x[row][is_counted], shifted, before))
        expected.append([y for y, _ in pairs])
        alone = [last for _, last in pairs]
    assert not outputs[1][~mask].any()
    found = [*outputs[0], *(y[counts] for y, counts in zip(outputs[1], mask))]
    assert_rows_are_equal(module, leaves, found, state, [*expected[0], *expected[1]], alone)


def test_a_row_of_padding_keeps_its_state(case, module):
    entering = start(case, module)
    mask = mask_of([0, 3, 0], "right")
    _, last = module(case.draw(*mask.shape), entering, mask=mask)
    for row in (0, 2):
        kept = list(states.tensors(states.split(last)[row]))
        for one, other in zip(kept, states.tensors(row_of(entering, row)), strict=True):
            assert torch.equal(one, other)


def test_nan_stays_in_its_sequence(case, module):
    x = case.draw(1, 12)
    if not x.is_floating_point():
        return
    borders = torch.tensor([0, 5, 9, 12])
    spoilt = x.clone()
    spoilt[:, 5:9] = torch.nan
    spoilt.requires_grad_()
    y, last = module(spoilt, cu_seqlens=borders)
    clean = torch.cat([y[:, :5], y[:, 9:]], 1)
    clean_lasts = [tensor for row in (0, 2) for tensor in states.tensors(states.split(last)[row])]
    assert clean.isfinite().all()
    assert all(tensor.isfinite().all() for tensor in clean_lasts)
    (gradient,) = torch.autograd.grad(clean.sum(), spoilt)
    expected, _ = module(x, cu_seqlens=borders)
    torch.testing.assert_close(clean, torch.cat([expected[:, :5], expected[:, 9:]], 1), **CLOSE)
    assert torch.cat([gradient[:, :5], gradient[:, 9:]], 1).isfinite().all()


@of_each_kind
def test_streams_at_different_places_are_selected(case, module):
    mask = mask_of([2, 7, 5], "left")
    _, state = module(case.draw(*mask.shape), mask=mask)
    later = case.draw(N_ROWS, 6)
    whole, _ = module(later, state)
    for index in (torch.tensor([2, 0]), torch.tensor([False, True, True]), slice(1, 2), slice(0)):
        part, _ = module(later[index], states.select(state, index))
        torch.testing.assert_close(part, whole[index], **CLOSE)


@of_each_kind
def test_errors(case, module, monkeypatch):
    # Bad input is to reach the library's own checks, which the run-time shape checks would forestall.
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    x = case.draw(2, 6)
    mask, borders = torch.ones(2, 6, dtype=torch.bool), torch.tensor([0, 2, 6])
    packed = case.draw(1, 6)
    for length in (2, 3):
        with pytest.raises(ValueError, match="streams; expected one for each of the 2"):
            module(packed, module(case.draw(length + 1, 5))[1], cu_seqlens=borders)
    for wrong, kind, message in (
        ({"mask": mask, "cu_seqlens": borders}, ValueError, "both given"),
        ({"mask": mask[:, :5]}, ValueError, r"\(2, 5\); expected \(B, L\) = \(2, 6\)"),
        ({"mask": mask.long()}, TypeError, "int64 .* expected booleans"),
        ({"cu_seqlens": borders}, ValueError, "a batch of 2"),
        ({"reset": mask[:, :5]}, ValueError, r"reset is of shape \(2, 5\); expected \(B, L\) = \(2, 6\)"),
        ({"reset": mask.long()}, TypeError, "reset is int64 .* expected booleans"),
        ({"reset": mask, "mask": mask[:, :5]}, ValueError, "mask is of shape"),
        ({"reset": mask, "cu_seqlens": borders}, ValueError, "reset and cu_seqlens are both given"),
    ):
        with pytest.raises(kind, match=message):
            module(x, **wrong)
    for wrong, kind, message in (
        (borders.float(), TypeError, "float32; expected int32"),
        (borders[None], ValueError, "shape"),
        (borders[:1], ValueError, "shape"),
        (torch.tensor([1, 2, 6]), ValueError, "from 1 to 6; expected 0 to 6"),
        (torch.tensor([0, 2, 5]), ValueError, "from 0 to 5; expected 0 to 6"),
        (torch.tensor([0, 4, 2, 6]), ValueError, "falls from 4 to 2 after sequence 1"),
    ):
        with pytest.raises(kind, match=message):
            module(packed, cu_seqlens=wrong)
