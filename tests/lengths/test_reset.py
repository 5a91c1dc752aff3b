"""Rows that start anew: how they are run, and the scans' transitions of 0."""

import itertools

import jaxtyping
import pytest
import torch
from tests.gradients import require_same_gradients
from torch import nn

import recurra
from recurra import state as states
from recurra.lengths import run_resets
from recurra.mixers.rnn import RNN
from recurra.models.language_model import LanguageModel, LanguageModelConfig
from recurra.ops.cells.gru import GRUCell

RESET = torch.tensor([[0, 0, 1, 0, 1, 0], [1, 0, 0, 0, 0, 1], [0, 0, 0, 0, 0, 0]]).bool()
CLOSE = {"rtol": 1e-12, "atol": 1e-12}


def double(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def cut(reset):
    """The pieces of a row, as slices."""
    borders = [0, *reset.nonzero()[:, 0].tolist(), len(reset)]
    return [slice(begin, end) for begin, end in itertools.pairwise(borders) if end > begin]


# --- scans ---


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("shape", [(3, 6, 4), (6, 4), (4,), (1,), (3, 6, 1)], ids=str)
def test_a_scan_starts_anew(shape, reverse):
    a, b, h0 = double(*shape), double(3, 6, 4), double(3, 4)
    found = recurra.linear_scan(a, b, h0, reverse=reverse, reset=RESET)
    rows = []
    for row, gates in enumerate(a.expand(3, 6, 4)):
        pieces = cut(RESET[row])
        starts = {0: None if RESET[row, 0] else h0[row : row + 1]} if not reverse else {len(pieces) - 1: h0[[row]]}
        scans = [
            recurra.linear_scan(gates[piece][None], b[row : row + 1, piece], starts.get(number), reverse=reverse)
            for number, piece in enumerate(pieces)
        ]
        rows.append(torch.cat(scans, 1))
    require_same_gradients(found, torch.cat(rows), [a, b, h0], 1e-11)


@pytest.mark.parametrize("mode", ["recurrent", "scan", "chunk", "attention", "fused", "auto"])
def test_gate_loop_starts_anew(mode):
    d = 1 if mode == "fused" else 3
    q, k, v, a = (double(3, 6, 2, n) for n in (d, d, d, 1))
    state = double(3, 2, d, d)
    found, last = recurra.gate_loop(q, k, v, a, state=state, mode=mode, reset=RESET)
    rows, lasts = [], []
    for row in range(3):
        h = torch.zeros_like(state[row : row + 1]) if RESET[row, 0] else state[row : row + 1]
        outputs = []
        for piece in cut(RESET[row]):
            y, h = recurra.gate_loop(*(x[row : row + 1, piece] for x in (q, k, v, a)), state=h, mode=mode)
            outputs.append(y)
            last_of_row, h = h, None
        rows.append(torch.cat(outputs, 1))
        lasts.append(last_of_row)
    torch.testing.assert_close(last, torch.cat(lasts), **CLOSE)
    require_same_gradients(found, torch.cat(rows), [q, k, v, a, state], 1e-11)


def test_operators_refuse_what_does_not_fit(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    a, x = torch.rand(3, 6, 1, 1), torch.rand(3, 6, 1, 1)
    for operator in (
        lambda **given: recurra.linear_scan(a, x, **given),
        lambda **given: recurra.gate_loop(x, x, x, a, **given),
    ):
        with pytest.raises(ValueError, match=r"reset is of shape \(3, 5\); expected \(B, L\) = \(3, 6\)"):
            operator(reset=RESET[:, 1:])
        with pytest.raises(TypeError, match=r"reset is int64 .* expected booleans"):
            operator(reset=RESET.long())
        with pytest.raises(TypeError, match=r"reset is a list; expected a torch.Tensor"):
            operator(reset=[True])
    borders = torch.tensor([0, 6])
    with pytest.raises(ValueError, match="reset and cu_seqlens are both given"):
        recurra.linear_scan(a[:1], x[:1], cu_seqlens=borders, reset=RESET[:1])


# --- modules ---


class Watched(nn.Module):
    """A mixer that remembers its calls: the shape, the borders, and whether there was a mask."""

    def __init__(self):
        super().__init__()
        self.mixer = recurra.create_mixer("min-gru", 1)
        self.calls = []

    def forward(self, x, state=None, *, mask=None, cu_seqlens=None):
        self.calls.append((tuple(x.shape[:2]), None if cu_seqlens is None else cu_seqlens.tolist(), mask is not None))
        return self.mixer(x, state, mask=mask, cu_seqlens=cu_seqlens)


@pytest.mark.parametrize(
    ("rows", "calls"),
    [
        (RESET, [((3, 6), None, True), ((1, 10), [0, 2, 4, 9, 10], False)]),
        (RESET[:1], [((1, 2), None, False), ((1, 4), [0, 2, 4], False)]),
        (RESET[2:], [((1, 6), None, False)]),
    ],
    ids=["all", "one", "none"],
)
def test_old_sequences_go_together_and_so_do_new_ones(rows, calls):
    module = Watched()
    run_resets(module, torch.randn(*rows.shape, 1), None, rows)
    assert module.calls == calls


def test_nan_does_not_pass_a_reset():
    mixer = recurra.create_mixer("gateloop", 8)
    x = torch.randn(3, 6, 8)
    expected, expected_last = mixer(x, reset=RESET)
    spoilt = x.clone()
    spoilt[0, :4], spoilt[2] = torch.nan, torch.nan
    y, last = mixer(spoilt, reset=RESET)
    assert y[0, :4].isnan().all()
    torch.testing.assert_close(y[0, 4:], expected[0, 4:])
    torch.testing.assert_close(y[1], expected[1])
    torch.testing.assert_close(states.select(last, slice(2)), states.select(expected_last, slice(2)))


def test_a_reset_at_every_first_step_keeps_the_type_under_autocast():
    mixer, x = recurra.create_mixer("gateloop", 8), torch.randn(2, 6, 8)
    first = torch.zeros(2, 6, dtype=torch.bool)
    first[:, 0] = True
    with torch.autocast("cpu", torch.bfloat16):
        y, _ = mixer(x, reset=first)
        expected, _ = mixer(x)
    assert y.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(y, expected)


def test_losses_of_rows_that_start_anew():
    model = LanguageModel(LanguageModelConfig(9, None, 2, 8, 8)).double()
    tokens, targets = torch.randint(9, (2, 3, 6))
    losses, _ = model.loss(tokens, targets, reset=RESET)
    alone = [
        torch.cat([model.loss(tokens[[row], piece], targets[[row], piece])[0] for piece in cut(RESET[row])], 1)
        for row in range(3)
    ]
    torch.testing.assert_close(losses, torch.cat(alone), **CLOSE)


def test_what_is_shared_between_layers_is_refused_beside_a_reset():
    with pytest.raises(ValueError, match="prepared is given for sequences of different lengths"):
        RNN(GRUCell(8, 8))(torch.randn(3, 6, 8), reset=RESET, prepared=None)
