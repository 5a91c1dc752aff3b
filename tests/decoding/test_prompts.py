"""Compiled prompts: the numbers of compiled steps bit for bit, and the model for what they do not take."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from recurra.decoding.linear import DTYPES
from recurra.decoding.memory import StepMemory, StepNotCompiled
from recurra.decoding.packing import pack_linear_layers
from recurra.decoding.steps import CompiledStep
from recurra.models.language_model import LanguageModel, LanguageModelConfig
from recurra.state import tensors

pytestmark = pytest.mark.compile


def compiled_model(mixer="gateloop", numbers="int8", **options):
    config = LanguageModelConfig(
        vocab_size=31, n_layer=2, d_model=24, d_channel_mixing=41, mixer=mixer, mixer_options=options
    )
    return CompiledStep(pack_linear_layers(LanguageModel(config).eval(), numbers), 31)


def count_model_calls(compiled):
    calls = []
    compiled.model.blocks[0].register_forward_hook(lambda *_: calls.append(1))
    return calls


def assert_equal(mine, right):
    for x, y in zip((mine[0], *tensors(mine[1])), (right[0], *tensors(right[1])), strict=True):
        assert torch.equal(x, y)


def by_steps(compiled, prompt, state):
    logits = []
    for token in prompt.split(1, 1):
        after, state = compiled(token, state)
        logits.append(after)
    return torch.cat(logits, 1), state


@pytest.mark.parametrize(("numbers", "length"), [*((numbers, 13) for numbers in DTYPES), ("int8", 15)])
def test_a_prompt_is_its_steps_bit_for_bit(numbers, length):
    compiled, prompt = compiled_model(numbers=numbers), torch.randint(31, (1, length))
    start = compiled.model.initial_state(1)
    right = by_steps(compiled, prompt, start)
    hidden, _ = compiled.hidden(prompt, start)  # recorded where a length is the first of its kind
    compiled(prompt[:, :1])
    calls = count_model_calls(compiled)
    for state in (None, start):
        assert_equal(compiled(prompt, state), right)
        assert_equal(by_steps(compiled, prompt, state), right)
        assert_equal(compiled.hidden(prompt, state), (hidden, right[1]))
    assert torch.equal(compiled.head(hidden), right[0])
    assert not calls


def test_a_prompt_of_any_length_in_pieces_is_its_steps_bit_for_bit():
    compiled = compiled_model()
    assert compiled.prompts.has_pieces()
    calls = count_model_calls(compiled)
    for length in (1, 16, 17, 63, 143):
        prompt, state = torch.randint(31, (1, length)), compiled.model.initial_state(1)
        hidden, after = compiled.prompts.read_in_pieces(prompt, state)
        assert_equal((compiled.head(hidden), after), by_steps(compiled, prompt, state))
        first, middle = compiled.prompts.read_in_pieces(prompt[:, :5], state)
        rest, end = compiled.prompts.read_in_pieces(prompt[:, 5:], middle) if length > 5 else (hidden[:, :0], middle)
        assert_equal((torch.cat((first, rest), 1), end), (hidden, after))
    assert not calls
    with pytest.raises(RuntimeError, match="token"):
        compiled.prompts.read_in_pieces(torch.tensor([[31]]), state)


def test_a_model_without_instructions_has_no_pieces():
    assert not compiled_model("retnet", n_heads=2).prompts.has_pieces()


@pytest.mark.parametrize("mixer", ["s5", "lru", "linear-rnn", "min-gru", "min-lstm", "gru", "rwkv4-channel-mixing"])
def test_other_recurrences(mixer):
    compiled, prompt = compiled_model(mixer), torch.randint(31, (1, 4))
    _, state = compiled(torch.tensor([[1]]))
    compiled(prompt, state)
    calls = count_model_calls(compiled)
    assert_equal(compiled(prompt, state), by_steps(compiled, prompt, state))
    assert not calls


def test_what_programs_do_not_take_goes_through_the_model():
    compiled, prompt = compiled_model(numbers="float32"), torch.randint(31, (1, 16))
    _, state = compiled(prompt[:, :4])
    calls = count_model_calls(compiled)
    mask = torch.ones(1, 4, dtype=torch.bool)
    for result, right in (
        (compiled(prompt, state), compiled.model(prompt, state)),  # torch's products
        (compiled(prompt.view(4, 4)), compiled.model(prompt.view(4, 4))),
        (compiled.hidden(prompt[:, :4], state, mask=mask), compiled.model.hidden(prompt[:, :4], state, mask=mask)),
        (compiled(prompt[:, :0], state), compiled.model(prompt[:, :0], state)),
    ):
        assert_equal(result, right)
    assert len(calls) == 6
    with pytest.raises(IndexError):
        compiled(torch.tensor([[1, 31, 2, 3]]), state)
    with ThreadPoolExecutor(1) as pool, compiled.prompts.program(4)._lock:
        result = pool.submit(torch.no_grad()(compiled), prompt[:, :4], state).result(timeout=60)
    assert_equal(result, compiled.model(prompt[:, :4], state))


def test_prompts_that_cannot_be_compiled_go_through_the_model():
    compiled, prompt = compiled_model("retnet", n_heads=2), torch.randint(31, (1, 4))
    right = compiled.model(prompt)
    assert_equal(compiled(prompt), right)
    assert compiled.prompts._most == 3
    calls = count_model_calls(compiled)
    assert_equal(compiled(prompt), right)
    assert_equal(compiled(prompt[:, :3]), compiled.model(prompt[:, :3]))
    assert len(calls) == 3  # nothing is tried again


def test_a_program_that_is_wrong_is_refused(monkeypatch):
    from recurra.decoding import _lowering as lowering

    compiled, prompt = compiled_model(), torch.randint(31, (1, 4))
    monkeypatch.setitem(lowering.RULES, "aten.gelu.default", lambda memory, out, x, **_: memory.map("neg", out, x))
    assert_equal(compiled(prompt), compiled.model(prompt))
    assert compiled.prompts.program(4) is None


def test_turns_that_differ_are_not_repeated():
    memory, x = StepMemory([]), torch.zeros(4, 3)
    memory.keep(x)
    with pytest.raises(StepNotCompiled, match="turns of a repetition differ"):
        memory.repeat(3, lambda turn: memory.map("neg", x[turn], memory.constant(torch.ones(3))))
    with pytest.raises(StepNotCompiled, match="turns of a repetition differ"):
        memory.repeat(3, lambda turn: memory.map("neg", x[turn, : 2 + turn], 1.0))
