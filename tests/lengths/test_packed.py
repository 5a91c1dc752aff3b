"""Packed sequences against a loop over them: the scan that starts anew, and the way into padded rows and back."""

import jaxtyping
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.gradients import require_same_gradients

from recurra.lengths import PackedSequences
from recurra.mixers.base import create_mixer
from recurra.ops.scan.operator import linear_scan

LENGTHS = st.lists(st.integers(0, 12), min_size=1, max_size=6)


def borders_of(lengths, dtype=torch.int64):
    return torch.tensor([0, *lengths]).cumsum(0).to(dtype)


def draw(dtype, *shape):
    return torch.randn(shape, dtype=dtype, requires_grad=True)


@given(
    lengths=LENGTHS,
    reverse=st.booleans(),
    dtype=st.sampled_from([torch.float64, torch.complex128]),
    backend=st.sampled_from(["reference", "numba"]),
    gates=st.sampled_from(["full", "by channel", "one"]),
    has_h0=st.booleans(),
)
@example([0, 3, 0, 0, 5, 0], True, torch.float64, "numba", "by channel", True)
@example([0, 3, 0, 0, 5, 0], False, torch.complex128, "numba", "full", True)
@example([0, 0], False, torch.float64, "auto", "full", True)
@settings(max_examples=25, deadline=None, derandomize=True)
def test_a_scan_starts_anew(lengths, reverse, dtype, backend, gates, has_h0):
    n_steps = sum(lengths)
    a = draw(dtype, *{"full": (1, n_steps, 2, 3), "by channel": (2, 3), "one": ()}[gates])
    b, h0 = draw(dtype, 1, n_steps, 2, 3), draw(dtype, len(lengths), 2, 3) if has_h0 else None
    options = {"reverse": reverse, "backend": backend}
    h = linear_scan(a, b, h0, cu_seqlens=borders_of(lengths, torch.int32), **options)
    parts = []
    for number, (own_a, own_b) in enumerate(zip(a.expand(b.shape).split(lengths, 1), b.split(lengths, 1))):
        parts.append(linear_scan(own_a, own_b, None if h0 is None else h0[number : number + 1], **options))
    require_same_gradients(h, torch.cat(parts, 1), [x for x in (a, b, h0) if x is not None], 1e-13)


def test_a_scan_refuses_what_are_no_borders(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    a, b = torch.rand(2), torch.rand(1, 7, 2)
    for wrong, kind, message in (
        ([0, 7], TypeError, "a list; expected a torch.Tensor"),
        (torch.tensor([0.0, 7.0]), TypeError, "float32; expected int32 or int64"),
        (torch.tensor([[0, 7]]), ValueError, r"\(1, 2\); expected \(N \+ 1,\)"),
        (torch.tensor([0]), ValueError, r"\(1,\); expected \(N \+ 1,\) for N >= 1 sequences"),
        (torch.tensor([0, 5, 3, 7]), ValueError, "falls from 5 to 3 after sequence 1"),
        (torch.tensor([1, 7]), ValueError, "from 1 to 7"),
    ):
        with pytest.raises(kind, match=message):
            linear_scan(a, b, cu_seqlens=wrong)
    with pytest.raises(ValueError, match="cu_seqlens is given for a batch of 2; expected packed tensors of batch 1"):
        linear_scan(a, torch.rand(2, 7, 2), cu_seqlens=torch.tensor([0, 7]))


@given(lengths=LENGTHS)
@example([0, 0])
@example([100, 3, 0, 50, 49, 1])
@settings(max_examples=40, deadline=None, derandomize=True)
def test_rows_and_back(lengths):
    n_steps = sum(lengths)
    x = torch.arange(1.0, n_steps + 1)[None, :, None].expand(1, n_steps, 2)
    packed = PackedSequences(borders_of(lengths), x)
    rows, n_places = packed.padded(x, 0.0), 0
    for group, row in zip(packed.groups, rows, strict=True):
        n_places += row[..., 0].numel()
        for number, of_one in zip(group.sequences.tolist(), row):
            length = lengths[number]
            assert torch.equal(of_one[:length], x[0].split(lengths)[number])
            assert not of_one[length:].any()
        is_step = torch.ones(row.shape[:2], dtype=torch.bool) if group.is_step is None else group.is_step
        assert is_step.sum(1).tolist() == [lengths[number] for number in group.sequences]
    assert n_places <= 2 * n_steps
    assert len(packed.groups) <= 2 + max(1, n_steps).bit_length()
    assert torch.equal(packed.packed(rows), x)
    assert packed.in_order([group.sequences for group in packed.groups]).tolist() == list(range(len(lengths)))
    assert packed.n_sequences == len(lengths)


def test_rows_refuse_a_state_of_other_streams():
    packed = PackedSequences(torch.tensor([0, 2, 5]), torch.zeros(1, 5, 1))
    with pytest.raises(ValueError, match="3 streams; expected one for each of the 2 sequences"):
        packed.states((torch.zeros(3, 1),))


def test_another_default_device_changes_nothing():
    """Its bookkeeping is on the host, wherever torch makes tensors by default; `meta` stands in for a GPU."""
    layer = create_mixer("min-gru", 8)
    x, borders = torch.randn(1, 9, 8), torch.tensor([0, 3, 3, 9])
    reset = torch.zeros(1, 9, dtype=torch.bool)
    reset[0, 4] = True
    expected = [layer(x, cu_seqlens=borders), layer(x, reset=reset)]
    with torch.device("meta"):
        found = [layer(x, cu_seqlens=borders), layer(x, reset=reset)]
    for (y, state), (right, last) in zip(found, expected):
        assert torch.equal(y, right)
        torch.testing.assert_close(tuple(state), tuple(last), rtol=0, atol=0)
