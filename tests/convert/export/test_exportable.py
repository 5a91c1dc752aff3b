"""Which models are refused, and what the errors say."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from recurra.convert.export.programs import (
    RealProgram,
    prefill_program,
    require_exportable,
    state_tensors,
    step_program,
)
from recurra.mixers.base import Mixer, StateSpec
from recurra.models.compact_recurrent_transformer import CompactRecurrentTransformer, CompactRecurrentTransformerConfig
from recurra.models.language_model import LanguageModel, LanguageModelConfig
from recurra.ops.gate_loop.operator import gate_loop

pytestmark = pytest.mark.compile


def make_model(mixer="gateloop", **options) -> LanguageModel:
    config = LanguageModelConfig(
        vocab_size=5, n_layer=1, d_model=4, d_channel_mixing=4, mixer=mixer, mixer_options=options
    )
    return LanguageModel(config)


@pytest.mark.parametrize(
    ("mixer", "options", "reason"),
    [
        ("gateloop-attention", {}, "keeps the last steps themselves"),
        ("rotary-attention", {"n_heads": 1}, "keeps the last steps themselves"),
        ("relative-attention", {}, "grows up to the segment's end"),
    ],
)
def test_mixers_whose_graph_depends_on_the_length_are_refused(mixer, options, reason):
    for export in (prefill_program, step_program):
        with pytest.raises(ValueError, match=reason):
            export(make_model(mixer, **options))


def test_models_over_segments_are_refused():
    config = CompactRecurrentTransformerConfig(
        vocab_size=5, n_layer=1, d_model=4, n_heads=2, d_channel_mixing=4, segment_length=3
    )
    with pytest.raises(ValueError, match="CompactRecurrentTransformer cannot be exported: its state grows"):
        require_exportable(CompactRecurrentTransformer(config))


def test_other_types_and_batches_are_refused():
    with pytest.raises(ValueError, match=r"float64; expected float32: use model.float\(\)"):
        prefill_program(make_model().double())
    with pytest.raises(ValueError, match="batch is 0; expected at least 1"):
        step_program(make_model(), batch=0)


class _Seen(NamedTuple):
    total: Tensor


class _Branching(Mixer):
    """A mixer that takes another way for long texts."""

    def __init__(self) -> None:
        super().__init__(4, _Seen, total=StateSpec((4,)))

    def mix(self, x, state, mask):
        return x * (2 if x.shape[1] > 6 else 1), _Seen(state.total + x.sum(1))


class _Reading(_Branching):
    """A mixer that looks at the numbers."""

    def mix(self, x, state, mask):
        return super().mix(x * (2 if x.sum() > 0 else 1), state, mask)


@pytest.mark.parametrize(
    ("mixer", "said"),
    [(_Branching, "has a graph for 2 to 6 tokens"), (_Reading, "cannot be traced for any number of tokens")],
)
def test_a_mixer_of_ones_own_that_has_no_such_graph_is_refused(mixer, said):
    model = make_model()
    model.blocks[0].mixer = mixer()
    with pytest.raises(ValueError, match=rf"the language model \(gateloop\) {said}"):
        prefill_program(model)


def test_the_state_is_described_by_name_and_shape_and_the_mode_stays():
    model = make_model(n_heads=2).train()
    (tensor,) = state_tensors(model)
    assert tensor == ("layers.0.h", (2, 2, 2, 2), True)
    prefill_program(model)
    assert model.training


class _Complex(_Branching):
    """A mixer with an operator that has no form in real numbers here."""

    def mix(self, x, state, mask):
        turned = torch.complex(x, x).exp().real
        return turned, _Seen(state.total + turned.sum(1))


def test_a_mixer_of_ones_own_that_onnx_has_not_is_refused():
    pytest.importorskip("onnxscript", reason="needs the extra export: pip install recurra[export]")
    pytest.importorskip("onnxruntime", reason="needs the extra export: pip install recurra[export]")
    from recurra.convert.export.onnx_file import to_onnx

    model = make_model()
    model.blocks[0].mixer = _Complex()
    with (
        pytest.raises(
            ValueError, match=r"(?s)the model cannot be written in ONNX.*aten.exp.default on complex numbers"
        ),
    ):
        to_onnx(model)


class _Turning(nn.Module):
    """One step of a GateLoop of one's own, whose complex gates come from torch.polar."""

    def forward(self, q: Tensor, phase: Tensor, h: Tensor) -> tuple[Tensor, ...]:
        y, last = gate_loop(q, q, q, torch.polar(torch.sigmoid(phase), phase), state=torch.complex(h, h))
        return y.real, last.real, last.imag


def test_complex_gates_are_written_in_real_numbers():
    inputs = torch.randn(2, 1, 3, 1), torch.randn(2, 1, 3, 1), torch.randn(2, 3, 1, 1)
    program = RealProgram(torch.export.export(_Turning(), inputs))
    torch.testing.assert_close(program(*inputs), _Turning()(*inputs))


class _Transform(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.fft(x).real


def test_operators_that_make_complex_numbers_in_another_way_are_refused():
    program = RealProgram(torch.export.export(_Transform(), (torch.randn(4),)))
    with pytest.raises(ValueError, match=r"fft.* on complex numbers cannot be written in real ones"):
        program(torch.randn(4))
