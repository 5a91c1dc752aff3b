"""`check_contract` passes what keeps the contract, and says how anything else breaks it."""

import pytest
import torch
from tests.contracts.conftest import build_model
from torch import nn

import recurra
from recurra.testing import check_contract


class Average(nn.Module):
    """An exponential moving average of torch alone, kept in every way that the contract asks for."""

    def __init__(self):
        super().__init__()
        self.decay = nn.Parameter(torch.rand(4))

    def start(self, x):
        return x.new_zeros(x.shape[0], x.shape[2])

    def forward(self, x, state=None, mask=None):
        h, outputs = self.start(x) if state is None else state, []
        for number, step in enumerate(x.unbind(1)):
            following = self.decay * h + step
            h = following if mask is None else torch.where(mask[:, number, None], following, h)
            outputs.append(h)
        return torch.stack(outputs, 1) if outputs else torch.zeros_like(x), h


class DropsTheState(Average):
    def forward(self, x, state=None):
        return super().forward(x)


class DropsTheGradient(Average):
    def forward(self, x, state=None):
        return super().forward(x, None if state is None else state.detach())


class SeesTheFuture(Average):
    def forward(self, x, state=None):
        y, state = super().forward(x, state)
        return y - x.mean(1, keepdim=True), state


class MeetsTheBatch(Average):
    def forward(self, x, state=None):
        return super().forward(x - x.mean(0), state)


class KeepsTheState(Average):
    kept = None

    def start(self, x):
        return super().start(x) if self.kept is None else self.kept[:1].expand(len(x), -1)

    def forward(self, x, state=None):
        y, self.kept = super().forward(x, state)
        return y, self.kept


class WritesToTheState(Average):
    def forward(self, x, state=None):
        y, last = super().forward(x, state)
        if state is not None:
            state.copy_(last)
        return y, last


class CountsPadding(Average):
    def forward(self, x, state=None, mask=None):
        return super().forward(x, state, mask if state is None else None)


class WritesToABuffer(Average):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x, state=None):
        self.count += 1
        return super().forward(x, state)


class CountsCalls(Average):
    def forward(self, x, state=None):
        h, count = (None, 0) if state is None else state
        y, h = super().forward(x, h)
        return y, (h, count + 1)


class NeedsSteps(Average):
    def forward(self, x, state=None):
        if x.shape[1] == 0:
            raise RuntimeError("no steps")
        return super().forward(x, state)


class HasHarmlessParts(Average):
    """An infinity, numbers that are not floating-point, and a gradient that is zero but for rounding."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.ones(4))

    def forward(self, x, state=None):
        start = None, torch.zeros(len(x), dtype=torch.long), x.new_full((len(x), 4), -torch.inf)
        h, count, most = start if state is None else state
        y, h = super().forward(x + (self.bias - self.bias) / 3, h)
        y = torch.softmax(y + self.bias.sum(), -1)
        most = torch.cat([most[:, None], x], 1).amax(1)
        return nn.functional.pad(y, (0, 1), value=-torch.inf), (h, count + x.shape[1], most)


class OnlyLastStep(Average):
    def forward(self, x, state=None):
        y, state = super().forward(x, state)
        return y[:, -1], state


class OfTorch(nn.GRU):
    """Its state has the batch in the second dimension."""

    def __init__(self):
        super().__init__(4, 4, batch_first=True)

    def forward(self, x, state=None):
        return super().forward(x, state)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (DropsTheState, "y changes if a sequence at the start of a stream is cut into single steps: by up to"),
        (
            DropsTheGradient,
            "the gradient of the input changes if a sequence at the start of a stream is cut",
        ),
        (SeesTheFuture, "y depends on later steps"),
        (MeetsTheBatch, "y depends on other sequences of the batch"),
        (KeepsTheState, "y changes if the module is called in between"),
        (WritesToTheState, "a call changes the state that it is given"),
        (CountsPadding, "y depends on the padding before a sequence at the middle of a stream"),
        (WritesToABuffer, "a call changes count of the module"),
        (CountsCalls, "leaf 1 of the last state changes .*: 9 instead of 1"),
        (NeedsSteps, "a piece without steps raises RuntimeError: no steps"),
        (OnlyLastStep, r"y is of shape \(3, 4\); expected \(3, 9\) first"),
        (OfTorch, r"shapes \[\(1, 3, 4\)\]; expected the batch, 3, first"),
        (nn.Identity, "module.x. returns a Tensor; expected a pair"),
    ],
)
def test_what_breaks_the_contract_is_named(broken, message):
    with pytest.raises(AssertionError, match=message):
        check_contract(broken().double(), torch.randn(3, 9, 4, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_keeps_the_contract_passes(dtype):
    check_contract(Average().to(dtype), torch.randn(3, 9, 4, dtype=dtype))
    check_contract(HasHarmlessParts().to(dtype), torch.randn(3, 9, 4, dtype=dtype))
    check_contract(recurra.create_mixer("gateloop", 4).to(dtype), torch.randn(3, 9, 4, dtype=dtype))


def test_a_model_of_tokens_passes_and_keeps_its_mode():
    model = build_model("recurrent", mixer="gru", dropout=0.5).train()
    model.embedding.eval()
    check_contract(model, torch.randint(11, (2, 9)))
    assert model.training
    assert not model.embedding.training


def test_a_state_of_other_things_is_refused():
    module = Average()
    module.forward = lambda x, state=None: (x, "state")
    with pytest.raises(TypeError, match="state holds a str"):
        check_contract(module, torch.randn(2, 4, 4))


def test_too_small_an_input_is_refused():
    for shape in ((1, 9, 4), (3, 3, 4)):
        with pytest.raises(ValueError, match=r"x is .*; expected \(B, L, ...\)"):
            check_contract(Average(), torch.randn(shape))


class IsInexact(Average):
    def forward(self, x, state=None):
        y, state = super().forward(x, state)
        return y * (1 + 1e-3 * torch.rand_like(y)), state


def test_what_is_inexact_passes_within_a_tolerance():
    x = 1000 * torch.randn(3, 9, 4)  # differences are relative
    check_contract(IsInexact(), x, tolerance=0.01)
    with pytest.raises(AssertionError, match="rounding explains"):
        check_contract(IsInexact(), x)
