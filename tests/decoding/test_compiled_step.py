"""Compiled steps: the model's numbers along a stream for every recurrence, and the model where they do not apply."""

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from recurra import state as states
from recurra.decoding import steps
from recurra.decoding.linear import MOST_VECTORS, DecodingLinear
from recurra.decoding.memory import StepNotCompiled
from recurra.decoding.packing import pack_linear_layers
from recurra.decoding.steps import _MOST_ROWS, CompiledStep, prepare
from recurra.layers.experts import SigmoidRouter
from recurra.models.compact_recurrent_transformer import CompactRecurrentTransformer, CompactRecurrentTransformerConfig
from recurra.models.language_model import LanguageModel, LanguageModelConfig
from recurra.models.transformer_xl import TransformerXL, TransformerXLConfig
from recurra.state import map_tensors, n_bytes, tensors

pytestmark = pytest.mark.compile  # while torch records, its tracer stands between the shape checks and their tensors

MIXERS = {
    "gateloop": {"n_heads": 24},
    "retnet": {"n_heads": 2},
    "linear-attention": {"n_heads": 2},
    "s4d": {},
    "s5": {},
    "lru": {},
    "linear-rnn": {},
    "gru": {},
    "mamba": {},
    "mamba2": {"n_heads": 2, "d_state": 9},
    "mamba3": {"n_heads": 2, "d_state": 8},
    "gla": {"n_heads": 2},
    "mlstm": {"n_heads": 2},
    "rg-lru": {"n_heads": 2},
    "gated-delta-net": {"n_heads": 2},
    "kda": {"n_heads": 2},
    "rwkv4": {},
    "rwkv4-channel-mixing": {},
    "rwkv7": {"n_heads": 2},
    "rwkv7-channel-mixing": {},
    "short-conv": {"biases": True},
    "slstm": {"n_heads": 2},
    "performer": {"n_heads": 2},
}


def language_model(mixer="gateloop", vocab_size=31, d_model=24, **options):
    config = LanguageModelConfig(
        vocab_size=vocab_size, n_layer=2, d_model=d_model, d_channel_mixing=41, mixer=mixer, mixer_options=options
    )
    return LanguageModel(config).eval()


def assert_near(mine, right, tolerance=5e-6):
    for x, y in zip((mine[0], *tensors(mine[1])), (right[0], *tensors(right[1])), strict=True):
        assert x.dtype == y.dtype
        assert x.shape == y.shape
        assert (x - y).abs().max() <= tolerance * y.abs().max()


def tolerance_of(numbers):
    """An input between two codes can be rounded to either, and moves what follows."""
    return {"float32": 5e-6, "bfloat16": 0.02}.get(numbers, 0.1)


def count_model_calls(compiled):
    calls = []
    compiled.model.register_forward_hook(lambda *_: calls.append(1))
    return calls


@pytest.mark.parametrize("mixer", MIXERS)
def test_a_compiled_stream_is_the_models(mixer):
    model = pack_linear_layers(language_model(mixer, **MIXERS[mixer]))
    compiled, state, other = CompiledStep(model, 31), None, None
    assert compiled.program(3) is not None
    for piece in torch.randint(31, (1, 19)).split([3, 1, 1, 1, 5, *[1] * 6, 2], dim=1):
        expected, state = model(piece, state)
        logits, other = compiled(piece, other)
        assert type(other) is type(state)
        assert_near((logits, other), (expected, state))


@pytest.mark.parametrize(
    ("options", "numbers"),
    [
        ({"n_heads": 2}, "bfloat16"),
        ({"n_heads": 1, "transition": "fixed"}, "int8"),
        ({"output_gate": True}, "int4"),
        ({"mixer": "rwkv7", "n_heads": 2}, "int8"),
        ({"mixer": "rwkv7", "n_heads": 3}, "int4"),
    ],
)
def test_heads_and_rounded_weights(options, numbers):
    model = pack_linear_layers(language_model(**options), numbers)
    compiled = CompiledStep(model, 31)
    _, state = model(torch.tensor([[1]]))
    other = state
    for token in torch.randint(31, (8, 1, 1)):
        expected, state = model(token, state)
        logits, other = compiled(token, other)
        assert_near((logits, other), (expected, state), tolerance_of(numbers))


@pytest.mark.parametrize("numbers", ["float32", "int8", "int4"])
def test_experts_chosen_within_groups(numbers):
    options = {"n_experts": 8, "top_k": 3, "d_expert": 16, "router": "sigmoid", "n_groups": 4, "top_groups": 2}
    shape = {"feed_forward": "mixture-of-experts", "feed_forward_options": options, "mixer": "gateloop"}
    model = LanguageModel(LanguageModelConfig(31, None, 2, 24, 41, **shape)).eval()
    for router in (part for part in model.modules() if isinstance(part, SigmoidRouter)):
        router.bias.normal_(0, 0.3)
    model = pack_linear_layers(model, numbers)
    compiled = CompiledStep(model, 31)
    tokens = torch.randint(31, (9, 3, 1))
    state = model(tokens[0])[1]
    compiled(tokens[0], state)  # which records steps of three rows
    calls = count_model_calls(compiled)
    for token in tokens[1:]:
        expected = model.hidden(token, state)
        mine = compiled(token, state)
        assert_near(mine, (model.head(expected[0]), expected[1]), tolerance_of(numbers))
        state = expected[1]
    assert not calls


@pytest.mark.parametrize(("mixer", "options"), [("rg-lru", {"d_conv": 1}), ("short-conv", {"kernel_size": 1})])
@torch.no_grad()
def test_a_state_with_a_tensor_without_numbers(mixer, options):
    """That of a convolution of one step."""
    model = language_model(mixer, **options)
    compiled, state, right = prepare(model), None, None
    for token in torch.randint(31, (4, 1, 1)):
        y, state = compiled(token, state)
        expected, right = model(token, right)
        torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)


def test_wide_models_over_threads(threads):
    model = pack_linear_layers(language_model(d_model=131, vocab_size=301))
    compiled = CompiledStep(model, 301)
    _, state = model(torch.tensor([[1]]))
    assert_near(compiled(torch.tensor([[300]]), state), model(torch.tensor([[300]]), state))


@pytest.mark.parametrize("numbers", ["float32", "int8"])
def test_every_batch_up_to_the_largest_is_compiled_once(numbers):
    compiled = CompiledStep(pack_linear_layers(language_model(), numbers), 31)
    alone = [compiled(torch.tensor([[token % 31]])) for token in range(_MOST_ROWS + 1)]
    calls = count_model_calls(compiled)
    for batch in (3, 1, 9, 33, MOST_VECTORS, MOST_VECTORS + 3, _MOST_ROWS, _MOST_ROWS + 1, 3, 12, 10):
        tokens, state = torch.randint(31, (batch, 1)), states.concatenate([state for _, state in alone[:batch]])
        compiled(tokens, state)  # recorded where it is the first of its size
        before = len(calls)
        logits, after = compiled(tokens, state)
        assert len(calls) - before == (batch > _MOST_ROWS)
        assert_near((logits, after), compiled.model(tokens, state), tolerance_of(numbers))
        if batch <= _MOST_ROWS:  # a row is the same in every batch, bit for bit
            for row, one in enumerate(states.split(after)):
                right = compiled(tokens[row : row + 1], alone[row][1])
                assert torch.equal(logits[row : row + 1], right[0])
                assert all(map(torch.equal, tensors(one), tensors(right[1])))
    assert sorted(compiled._programs) == [1, 3, 12, 48, MOST_VECTORS]  # no others were recorded
    assert [batch for batch in range(80) if compiled.program(batch)] == compiled.sizes


@pytest.mark.parametrize(("rows_of_room", "largest"), [(0, 8), (15, 12), (30, 24)])
def test_batches_of_large_states_run_in_pieces(monkeypatch, rows_of_room, largest):
    model = pack_linear_layers(language_model())
    monkeypatch.setattr(steps, "_MOST_BYTES", rows_of_room * n_bytes(model(torch.tensor([[1]]))[1]))
    compiled = CompiledStep(model, 31)
    assert compiled.sizes[-1] == largest
    tokens = torch.arange(29)[:, None]
    _, state = model(tokens)
    calls = count_model_calls(compiled)
    compiled(tokens, state)  # recorded
    before = len(calls)
    results = compiled(tokens, state)
    assert len(calls) == before
    assert_near(results, model(tokens, state))


def test_a_batch_whose_step_cannot_be_recorded_goes_through_the_model(monkeypatch):
    compiled = CompiledStep(pack_linear_layers(language_model()), 31)
    monkeypatch.setattr(CompiledStep, "_record", lambda *_: (_ for _ in ()).throw(StepNotCompiled("of two rows")))
    tokens = torch.randint(31, (2, 1))
    _, state = compiled(tokens)
    right = compiled.model(tokens, state)
    assert_near(compiled(tokens, state), right, tolerance=0)
    calls = count_model_calls(compiled)
    assert_near(compiled(tokens, state), right, tolerance=0)
    assert len(calls) == 1  # nothing is tried again
    assert compiled.program(2) is None
    assert compiled.program(1) is not None


def test_what_it_does_not_take_goes_through_the_model():
    compiled = CompiledStep(pack_linear_layers(language_model()), 31)
    token = torch.tensor([[5]])
    _, state = compiled(token)
    calls = count_model_calls(compiled)
    right = compiled(token, state)
    assert not calls
    assert_near(compiled(token.int(), state), right)
    assert len(calls) == 1
    turned = map_tensors(lambda x: x.repeat_interleave(2, 1)[:, ::2], state)
    assert not next(tensors(turned)).is_contiguous()
    assert_near(compiled(token, turned), right, tolerance=0)
    conjugate = map_tensors(lambda x: x.conj().resolve_conj().conj(), state)
    assert_near(compiled(token, conjugate), right, tolerance=0)
    assert len(calls) == 1
    with (
        torch.enable_grad(),
        pytest.raises(RuntimeError, match="a tensor that requires a gradient; expected one that does not"),
    ):
        compiled(token, map_tensors(lambda x: x.clone().requires_grad_(), state))
    for wrong in (31, -1):
        with pytest.raises(IndexError):
            compiled(torch.tensor([[wrong]]), state)
    assert_near(compiled(token, state), right, tolerance=0)


def test_threads_at_once_and_a_workspace_that_is_taken():
    compiled = CompiledStep(pack_linear_layers(language_model()), 31)
    _, state = compiled(torch.tensor([[1]]))
    right = [compiled(torch.tensor([[token]]), state) for token in range(31)]

    @torch.no_grad()
    def run(token):
        for _ in range(40):
            assert_near(compiled(torch.tensor([[token]]), state), right[token])

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(run, (3, 7, 11)))
    calls = count_model_calls(compiled)
    with ThreadPoolExecutor(1) as pool, compiled.program(1)._lock:
        again = pool.submit(torch.no_grad()(compiled), torch.tensor([[4]]), state)
        assert_near(again.result(timeout=60), right[4])
    assert len(calls) == 1


def test_a_copy_has_memory_of_its_own():
    compiled = CompiledStep(pack_linear_layers(language_model()), 31)
    _, state = compiled(torch.tensor([[1]]))
    right = compiled(torch.tensor([[2]]), state)
    twin = copy.deepcopy(compiled)
    del compiled
    assert type(twin) is CompiledStep
    assert_near(twin(torch.tensor([[2]]), state), right, tolerance=0)


class Offset(nn.Module):
    """A model with an operation that there is no instruction for."""

    def __init__(self, model):
        super().__init__()
        self.model, self.config, self.linear = model, model.config, nn.Linear(1, 1)

    def forward(self, tokens, state=None):
        logits, state = self.model(tokens, state)
        return logits.cumprod(-1), state


class Threshold(Offset):
    """A model that decides in Python about a number in its state."""

    def forward(self, tokens, state=None):
        logits, state = self.model(tokens, state)
        return logits * (2.0 if float(logits.sum()) > 0 else 1.0), state


def test_the_fastest_form_there_is():
    gateloop = language_model()
    assert type(prepare(gateloop)) is CompiledStep
    assert type(prepare(gateloop, "int8")) is CompiledStep
    assert type(prepare(Offset(gateloop))) is Offset
    with pytest.raises(StepNotCompiled, match=r"no instruction for aten\.cumprod\.default$"):
        CompiledStep(Offset(gateloop).eval(), 31)
    with pytest.raises(StepNotCompiled, match="gives a number that depends on the step"):
        CompiledStep(Threshold(gateloop).eval(), 31)
    shape = {"vocab_size": 31, "segment_length": 5, "n_layer": 1, "d_model": 12, "n_heads": 2, "d_channel_mixing": 16}
    xl = TransformerXL(TransformerXLConfig(**shape, mem_len=4))
    crt = CompactRecurrentTransformer(CompactRecurrentTransformerConfig(**shape))
    for model in (xl, crt):
        assert type(prepare(model.eval())) is type(model)


def test_a_program_that_is_wrong_is_refused(monkeypatch):
    from recurra.decoding import _lowering as lowering

    monkeypatch.setitem(lowering.RULES, "aten.gelu.default", lambda memory, out, x, **_: memory.map("silu", out, x))
    with pytest.raises(ValueError, match="gives other numbers than the model"):
        CompiledStep(language_model(), 31)
    with pytest.warns(UserWarning, match="decoding without compiled steps, slower: .* other numbers"):
        assert type(prepare(language_model())) is LanguageModel


def test_a_model_that_carries_roundings_far_is_compared_with_itself():
    class Cancelling(nn.Module):
        """What its products leave is a thousandth of what they add up."""

        def __init__(self):
            super().__init__()
            linear = nn.Linear(64, 128)
            with torch.no_grad():
                linear.weight.copy_(torch.randn(128, 64) / 1000 + torch.tensor([1.0, -1.0]).repeat(32))
            self.linear = DecodingLinear(linear)

        def forward(self, x):
            return (self.linear(1 + x / 1000),)

    torch.manual_seed(0)
    compiled, step, x = CompiledStep(language_model(), 31), Cancelling(), torch.randn(1, 64)
    right = step(x)[0]
    with torch.no_grad(), steps._Nudged(3):
        (nudged,) = step(x)
    assert (nudged - right).abs().max() > 2 * steps._TOLERANCE * right.abs().max()
    with torch.no_grad():
        assert compiled._agrees([nudged], step, [x])
        assert not compiled._agrees([right + 6 * (nudged - right)], step, [x])
        assert not compiled._agrees([right * torch.nan], step, [x])


def test_results_of_a_chaotic_model_are_not_zeros_or_doubled():
    """Its own results differ by more than their size from one rounding to the next."""

    class Chaotic(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = DecodingLinear(nn.Linear(64, 128))

        def forward(self, x):
            return ((1e7 * self.linear(x)).sin(),)

    compiled, step, x = CompiledStep(pack_linear_layers(language_model(), "int8"), 31), Chaotic(), torch.randn(1, 64)
    with torch.no_grad():
        (right,) = step(x)
        assert compiled._agrees([right], step, [x])
        assert not any(compiled._agrees([wrong], step, [x]) for wrong in (0 * right, 2 * right))


def test_a_default_type_does_not_reach_the_comparison():
    step, x = DecodingLinear(nn.Linear(5, 3)), torch.ones(1, 5)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.no_grad(), steps._Nudged(0):
            assert step(x).dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)
