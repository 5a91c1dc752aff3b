"""Every mixer that can be exported: torch.export programs and the ONNX graph compute what the model computes."""

import numpy as np
import pytest
import torch

from recurra.convert.export.programs import StreamProgram, prefill_program, state_tensors, step_program, zero_state
from recurra.mixers.base import list_mixers
from recurra.models.language_model import LanguageModel, LanguageModelConfig
from recurra.state import tensors

pytestmark = pytest.mark.compile  # while torch.export traces, sizes are symbols, which the shape checks refuse

SIZES = {"vocab_size": 11, "d_model": 6, "d_channel_mixing": 7}
MIXERS = {  # one block each, so that one trace does for many
    "delta-net": {"n_heads": 2},
    "gated-delta-net": {"n_heads": 2, "n_qk_heads": 1},
    "gateloop": {},
    "gla": {"n_heads": 3},
    "hgrn2": {"n_heads": 6},  # one channel a head
    "gru": {},
    "h3": {"d_state": 4, "head_dim": 2},
    "hyena": {"window": 5},
    "kda": {"n_heads": 2},
    "lightning-attention": {"n_heads": 3},
    "linear-attention": {"n_heads": 2},
    "linear-rnn": {"d_state": 5},
    "lru": {"d_state": 5},
    "mamba": {"d_state": 3},
    "mamba2": {"d_state": 3, "n_heads": 2, "n_groups": 2},
    "mamba3": {"d_state": 4, "n_heads": 2},
    "min-gru": {},
    "min-lstm": {},
    "performer": {"n_heads": 2},
    "mlstm": {"n_heads": 3, "d_qk": 3},
    "retnet": {"n_heads": 3},
    "rg-lru": {"lru_width": 4, "n_heads": 2},
    "rwkv4": {"d_wkv": 5},
    "rwkv4-channel-mixing": {"d_hidden": 7},
    "rwkv7": {"n_heads": 2},
    "rwkv7-channel-mixing": {"d_hidden": 7},
    "s4d": {"d_state": 6, "discretisation": "bilinear"},
    "s5": {"d_state": 4},
    "s5-hyena": {"d_state": 4},
    "short-conv": {"biases": True},
    "slstm": {"n_heads": 2},
}
HALVES = {"one half": [*MIXERS][::2], "the other": [*MIXERS][1::2]}
SAMPLE = {
    "delta-net": MIXERS["delta-net"],
    "gateloop": {"n_heads": 3, "d_v": 9, "output_gate": True},
    "gru": {},
    "linear-rnn": {"d_state": 5, "transition": "dense"},
}
STACKS = {"a sample": SAMPLE, **{half: {name: MIXERS[name] for name in names} for half, names in HALVES.items()}}
SLOW_STACKS = ["a sample", "as many modes as rows", *(pytest.param(half, marks=pytest.mark.slow) for half in HALVES)]
CASES = {
    **{
        case: LanguageModelConfig(
            **SIZES, n_layer=len(mixers), mixer=[*mixers], mixer_options=mixers, tie_embeddings=case == "a sample"
        )
        for case, mixers in STACKS.items()
    },
    "as many modes as rows": LanguageModelConfig(  # as a trace has
        **SIZES, n_layer=1, mixer="s5", mixer_options={"d_state": 4}
    ),
    "fixed": LanguageModelConfig(
        **SIZES, n_layer=1, mixer_options={"transition": "fixed", "magnitude_activation": "stable_exponential"}
    ),
}
REFUSED = {
    *("gated-attention", "gateloop-attention", "mamba2-attention", "mla", "reformer", "relative-attention"),
    *("rotary-attention", "zamba2"),
}
TRACES = (prefill_program, step_program)
TOLERANCE = 1e-5  # of the largest number
SMALLEST = 0.1  # a state may be smaller than the errors of a deep stack's inputs, which are of order 1, would allow


def make_model(case: str) -> LanguageModel:
    """A model whose blocks add a tenth of what they read, so that rounding errors do not grow from block to block."""
    torch.manual_seed(3)
    model = LanguageModel(CASES[case]).eval()
    with torch.no_grad():
        model.embedding.weight.mul_(10)
    return model


def require_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.shape == expected.shape
    found, expected = found.detach(), expected.detach()
    assert (found - expected).abs().max() <= TOLERANCE * max(float(expected.abs().max()), SMALLEST)


def real(state) -> list[torch.Tensor]:
    return [torch.view_as_real(x) if x.is_complex() else x for x in tensors(state)]


def test_every_registered_mixer_is_here():
    assert {*MIXERS, *REFUSED} == set(list_mixers())


@pytest.mark.parametrize("case", [*SLOW_STACKS, "fixed"])
def test_torch_programs(case):
    model, batch = make_model(case), {"a sample": 3, "fixed": None}.get(case, 1)
    with torch.no_grad():
        prefill, step = (trace(make_model(case), batch=batch) for trace in TRACES)
        require_programs_compute(model, prefill, step, batch)
    if case in STACKS:
        for program, length in ((prefill, 4), (step, 1)):
            require_gradients(model, program, torch.randint(11, (batch, length)))


def require_programs_compute(model: LanguageModel, prefill: StreamProgram, step: StreamProgram, batch: int | None):
    assert prefill.state == step.state
    for length in (9, 2):
        n_streams = batch or length
        tokens = torch.randint(11, (n_streams, length))
        logits, last = model(tokens)
        found, *state = prefill.program.module()(tokens, *zero_state(prefill.state, n_streams))
        require_close(found, logits)
        token = torch.randint(11, (n_streams, 1))
        found, *state = step.program.module()(token, *state)
        logits, last = model(token, last)
        require_close(found, logits)
        for one, other in zip(state, real(last), strict=True):
            require_close(one, other)


def require_gradients(model: LanguageModel, traced: StreamProgram, tokens: torch.Tensor) -> None:
    module = traced.program.module()
    found, expected = module(tokens, *zero_state(traced.state, len(tokens)))[0], model(tokens)[0]
    require_close(found, expected)
    gradients = []  # the program's weights are those of the model that was traced, and not these
    for logits, owner in ((found, module), (expected, model)):
        names, weights = zip(*owner.named_parameters())
        found_here = torch.autograd.grad(logits.square().mean(), weights)
        gradients.append(dict(zip((name.removeprefix("model.") for name in names), found_here)))
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("case", SLOW_STACKS)
@torch.no_grad()
def test_onnx(case):
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package, reason="needs the extra export: pip install recurra[export]")
    from recurra.convert.export.onnx_file import OnnxModel, to_onnx

    model = make_model(case)
    exported = OnnxModel(to_onnx(model).SerializeToString(), threads=1)
    with pytest.raises(ValueError, match=r"tokens is of shape \(1, 0\); expected .* at least one step"):
        exported(np.zeros((1, 0), np.int64))
    for batch, length in ((1, 67), (3, 8)):  # neither was seen when the graph was made
        tokens = torch.randint(11, (batch, length))
        logits, last = model(tokens)
        found, state = exported(tokens.numpy())
        require_close(torch.from_numpy(found), logits)
        for one, other in zip(state.values(), real(last), strict=True):
            require_close(torch.from_numpy(one), other)
        pieces, state = [], None
        for piece in (tokens[:, :1], tokens[:, 1:6], *tokens[:, 6:].split(1, 1)):
            y, state = exported(piece.numpy(), state)
            pieces.append(y)
        require_close(torch.from_numpy(np.concatenate(pieces, 1)), logits)
        for one, other in zip(state.values(), real(last), strict=True):
            require_close(torch.from_numpy(one), other)


@pytest.mark.parametrize("case", HALVES)
@torch.no_grad()
def test_executorch(case):
    runtime = pytest.importorskip("executorch.runtime", reason="needs the extra executorch")
    from recurra.convert.export.programs import step_to_executorch

    model = make_model(case)
    program = runtime.Runtime.get().load_program(step_to_executorch(model))
    step, state = program.load_method("forward"), zero_state(state_tensors(model), 1)
    tokens, pieces = torch.randint(11, (1, 9)), []
    for token in tokens.split(1, 1):
        logits, *state = (x.clone() for x in step.execute([token.contiguous(), *state]))
        pieces.append(logits)
    logits, last = model(tokens)
    require_close(torch.cat(pieces, 1), logits)
    for one, other in zip(state, real(last), strict=True):
        require_close(one, other)
