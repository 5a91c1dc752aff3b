"""What everybody expects of a torch module: copies, files, batches, the compiler."""

import copy

import pytest
import torch
from tests.contracts.conftest import D_MODEL, VOCABULARY, of_each_kind
from tests.tracing import compile_by_tracing

from recurra import state as states


@of_each_kind
def test_deep_copy_is_independent(case, module):
    x = case.draw(2, 6)
    twin = copy.deepcopy(module)
    expected, _ = module(x)
    torch.testing.assert_close(twin(x)[0], expected)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.add_(1.0)
    assert torch.equal(module(x)[0], expected)


@of_each_kind
def test_save_and_load(case, module, tmp_path):
    x = case.draw(2, 6)
    torch.save(module.state_dict(), tmp_path / "weights.pt")
    other = case.build().double()
    assert not torch.allclose(other(x)[0], module(x)[0])
    other.load_state_dict(torch.load(tmp_path / "weights.pt", weights_only=True))
    assert torch.equal(other(x)[0], module(x)[0])


def test_rows_of_a_batch_do_not_meet(case, module):
    x = case.draw(3, 7)
    together, _ = module(x)
    for row in range(3):
        torch.testing.assert_close(module(x[row : row + 1])[0], together[row : row + 1])


def test_an_empty_batch_runs(case, module):
    y, state = module(case.draw(0, 5))
    assert y.shape[:2] == (0, 5)
    assert all(tensor.shape[0] == 0 for tensor in states.tensors(state))


def test_an_empty_batch_gives_every_parameter_a_gradient(case, module):
    y, _ = module(case.draw(0, 9))
    y.sum().backward()
    gradients = {name: p.grad for name, p in module.named_parameters()}
    assert {name for name, gradient in gradients.items() if gradient is None or gradient.any()} == set()


def test_every_parameter_gets_a_gradient(case, module):
    y, _ = module(case.draw(2, 9))
    y.square().sum().backward()
    missing = [name for name, p in module.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert missing == []


@pytest.mark.parametrize("token", [VOCABULARY, -1])
def test_a_token_outside_the_vocabulary_is_named(language_model, token):
    tokens = torch.tensor([[1, token, 2]])
    refused = rf"^tokens is a tensor with the id {token}; expected ids from 0 to {VOCABULARY - 1}$"
    with pytest.raises(IndexError, match=refused):
        language_model(tokens)
    with pytest.raises(IndexError, match=refused):
        language_model.loss(tokens, torch.ones_like(tokens))


NO_NUMBERS = [
    lambda x: x.to("meta"),
    lambda x: x.to_sparse(),
    lambda x: x.flatten(1).to_sparse_csr(),
    lambda x: torch.nested.nested_tensor([x[0], x[1, :3]]),
]


@pytest.mark.filterwarnings("ignore:.*prototype:UserWarning", "ignore:Sparse CSR:UserWarning")
def test_tensors_without_plain_numbers_are_refused(unchecked, case, module):
    x, model = case.draw(2, 6), getattr(module, "model", module)
    if model is not module:
        x = x.flatten(1, 2)
    for make in NO_NUMBERS:
        with pytest.raises((TypeError, ValueError), match=r"^(x|tokens|clip) is .* (tensor|on meta); expected "):
            model(make(x))


@pytest.mark.compile
def test_compile_equals_eager(compiled_case):
    module = compiled_case.build().double()
    start = torch.compile(module, fullgraph=True, backend="eager")  # the start of a stream has the same operators
    proceed = compile_by_tracing(module)
    x = compiled_case.draw(2, compiled_case.traced_steps)

    def run(start, proceed):
        module.zero_grad()
        y, state = start(x)
        y, state = proceed(x, state)
        (y.square().sum() + sum(t.abs().square().sum() for t in states.tensors(state))).backward()
        return [y, *states.tensors(state), *(p.grad for p in module.parameters())]

    for actual, expected in zip(run(start, proceed), run(module, module), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-8, atol=1e-9)


def test_bfloat16_keeps_what_makes_transitions(mixer):
    """A whole layer in bfloat16 stays near itself for hundreds of steps: decays and frequencies are not rounded."""
    exact, x = mixer.float(), torch.randn(2, 300, D_MODEL).bfloat16()
    kept = {name: weight.clone() for name, weight in exact.named_parameters()}
    rounded = copy.deepcopy(exact).bfloat16()
    with torch.no_grad():
        expected, found = exact(x.float())[0][:, -50:], rounded(x)[0][:, -50:].float()
    assert (found - expected).norm() <= 0.06 * expected.norm()
    for name, weight in rounded.float().named_parameters():
        assert torch.equal(weight, kept[name]) or torch.equal(weight, kept[name].bfloat16().float())
