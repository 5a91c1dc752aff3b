"""Single steps as a recorded program: what a model does for one token, without the Python around it.

A step of a small recurrent model is some hundred short operations, and Python spends longer between them than they
take. Here the model's own forward runs once under `torch.jit.trace`, which writes down its operations; later steps run
that list. It is no second way of stepping: the recording is made from the one there is, and is compared with it.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from recurra.state import map_tensors, tensors

_CHECKED_STEPS = 3


class StepNotSteady(ValueError):
    """A model's steps cannot be recorded."""


class RecordedStep(nn.Module):
    """A model in evaluation mode that runs one token per row from a recording, and all else as it is.

    The recording is made at construction for `batch` rows; other inputs, among them the first step of a stream, go
    through the model. The model's weights are taken to stay as they are. Whatever else the model has (its `config`, its
    `head`) is found here, too.

    Args:
        model: called as `model(tokens, state) -> (logits, state)`.
        vocab_size: tokens are below it; a few are drawn for the recording and its check.
        batch: rows of the inputs that the recording takes.

    Raises:
        ValueError: the model is in training mode.
        StepNotSteady: a step cannot be recorded, because it depends on numbers in the state that are no tensors (a
            position that counts up) or its state grows. It is a ValueError.
    """

    def __init__(self, model: nn.Module, vocab_size: int, batch: int = 1) -> None:
        super().__init__()
        if model.training:
            raise ValueError("the model is in training mode; put it in evaluation mode first: model.eval()")
        self.model, self.vocab_size, self.batch = model, vocab_size, batch
        device = next(iter((*model.parameters(), *model.buffers()))).device
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(vocab_size, (_CHECKED_STEPS + 2, batch, 1), generator=generator).to(device)
        with torch.inference_mode(False), torch.no_grad():
            _, self._like = model(tokens[0])
            _require_steady(self._like, model(tokens[1], self._like)[1])
            self._program = self._record(tokens[1])
            self._check(tokens[1:])
        self.eval()

    def forward(self, tokens: Int[Tensor, "B L"], state: Any = None) -> tuple[Float[Tensor, "B L V"], Any]:
        """Give the logits after every token, going on from `state`; None is the start of a stream."""
        if state is None or tokens.shape != (self.batch, 1) or torch.is_grad_enabled():
            return self.model(tokens, state)
        results = self._run([tokens, *tensors(state)])
        if results is None:
            return self.model(tokens, state)
        logits, *after = results
        return logits, self._state(after)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("model"), name)

    def _state(self, flat: list[Tensor]) -> Any:
        parts = iter(flat)
        return map_tensors(lambda _: next(parts), self._like)

    def _run(self, inputs: list[Tensor]) -> Sequence[Tensor] | None:
        """Run the recording; None for what it does not take."""
        return self._program(*inputs)

    def _record(self, tokens: Tensor) -> Any:
        flat = Flat(self.model, self._state).eval()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about Python's decisions during the recording, which _check looks after
            recording = torch.jit.trace(flat, (tokens, *tensors(self._like)), check_trace=False)
            return torch.jit.freeze(recording)

    @staticmethod
    def _agrees(mine: Tensor, right: Tensor) -> bool:
        return torch.equal(mine, right)

    def _check(self, tokens: Tensor) -> None:
        mine = expected = self._like
        for row in tokens:
            logits, mine = self(row, mine)
            right, expected = self.model(row, expected)
            if not all(map(self._agrees, (logits, *tensors(mine)), (right, *tensors(expected)))):
                raise StepNotSteady(
                    f"a recorded step of {type(self.model).__name__} gives other numbers than the model"
                )


class Flat(nn.Module):
    """A model with its state as so many tensors, in and out."""

    def __init__(self, model: nn.Module, unflatten: Callable[[list[Tensor]], Any]) -> None:
        super().__init__()
        self.model, self._unflatten = model, unflatten

    def forward(self, tokens: Tensor, *flat: Tensor) -> tuple[Tensor, ...]:
        """Run one step."""
        logits, state = self.model(tokens, self._unflatten(list(flat)))
        return (logits, *tensors(state))


def _require_steady(before: Any, after: Any) -> None:
    """Raise ValueError where a step changes more of a state than the values of its tensors."""
    if _outline(before) != _outline(after):
        raise StepNotSteady(
            "the model's steps cannot be recorded: from one to the next, its state changes in more than the values of "
            "its tensors (a position that counts up, or a window that grows)"
        )


def _outline(state: Any) -> Any:
    """A state with the shape and type of each tensor in its place."""
    if isinstance(state, Tensor):
        return tuple(state.shape), state.dtype
    return [_outline(part) for part in state] if isinstance(state, (tuple, list)) else state
