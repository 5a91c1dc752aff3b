"""Short prompts of one stream as compiled programs, which read each weight once for all of their tokens."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from recurra.decoding._program import FlatCall, StateForm, StepProgram, lower_step
from recurra.decoding.memory import StepNotCompiled
from recurra.models.shell import LanguageModelShell
from recurra.state import tensors

MOST_TOKENS = 15
"""Tokens of the longest prompt that is compiled when it first occurs. Recording a length takes some 100 ms, and longer
prompts save too little for that; 16 tokens of float32 are torch's products (see `linear`)."""
_PIECES = (64, 32, 16, 12, 8, 6, 4, 3, 2, 1)
"""Tokens of the pieces in which `read_in_pieces` reads; longer ones would take as long for each token."""


class PromptReader:
    """Reads prompts of one stream: by `read` those of 2 to `MOST_TOKENS` tokens, by `read_in_pieces` all.

    A program is recorded and checked when its length first occurs.

    Args:
        model: what computes `hidden`.
        like: a state of one stream.
        vocab_size: tokens are below it.
        agrees: called as `agrees(results, module, inputs)`; whether results are close enough to the module's.
    """

    def __init__(
        self,
        model: LanguageModelShell,
        like: Any,
        vocab_size: int,
        agrees: Callable[[Sequence[Tensor], nn.Module, Sequence[Tensor]], bool],
    ) -> None:
        self.model, self._like, self._vocab_size, self._agrees = model, like, vocab_size, agrees
        self._states = StateForm(like)
        self._programs: dict[int, StepProgram | None] = {}
        self._most = MOST_TOKENS
        self._recording = threading.Lock()
        with torch.inference_mode(False), torch.no_grad():
            self._start = self._states.flatten(model.initial_state(1))

    def read(self, tokens: Tensor, state: Any) -> tuple[Tensor, Any] | None:
        """Return what `hidden` returns; None for what the programs do not take."""
        least = 1 if state is None else 2  # a step from a state has a program of its own
        is_one_stream = tokens.ndim == 2 and len(tokens) == 1
        if not is_one_stream or not least <= tokens.shape[1] <= self._most or torch.is_grad_enabled():
            return None
        flat = self._start if state is None else self._states.flatten(state)
        program = None if flat is None else self.program(tokens.shape[1])
        results = None if flat is None or program is None else program.run([tokens, *flat])
        if results is None:
            return None
        hidden, *flat = results
        return hidden, self._states.unflatten(flat)

    def hidden(self, tokens: Tensor, state: Any = None, **lengths: Any) -> tuple[Tensor, Any]:
        """Read a prompt, by the model if `read` does not take it; `lengths` are its `mask` and others."""
        has_lengths = any(value is not None for value in lengths.values())
        read = None if has_lengths else self.read(tokens, state)
        return self.model.hidden(tokens, state, **lengths) if read is None else read

    def has_pieces(self) -> bool:
        """Whether `read_in_pieces` can read every prompt; its programs are recorded now."""
        if self._start is None or not all(map(self.program, _PIECES)):
            return False
        first = self.program(1)
        return first is not None and first.run([torch.zeros(1, 1, dtype=torch.int64), *self._start]) is not None

    def read_in_pieces(self, tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Return what `hidden` returns for one stream's tokens (1, L), of any number, if `has_pieces`.

        The numbers are those of single steps, bit for bit, so they do not depend on how a prompt is cut.

        Raises:
            RuntimeError: a token or the state is not the model's, or another thread is reading.
        """
        flat, found = self._states.flatten(state), []
        while tokens.shape[1]:
            length = next(length for length in _PIECES if length <= tokens.shape[1])
            program = self.program(length)
            results = None if flat is None or program is None else program.run([tokens[:, :length], *flat])
            if results is None:
                raise RuntimeError("the compiled prompts do not take this token or state now")
            hidden, *flat = results
            found.append(hidden)
            tokens = tokens[:, length:]
        return torch.cat(found, 1), self._states.unflatten(flat or ())

    def program(self, length: int) -> StepProgram | None:
        """Return the program for this length, recorded now if need be; None if it cannot be compiled.

        Then nothing longer is tried, which would have the same operations.
        """
        if length not in self._programs:
            with self._recording:  # other threads wait for it instead of recording it too
                if length not in self._programs:
                    try:
                        self._programs[length] = self._recorded(length)
                    except StepNotCompiled:
                        self._programs[length], self._most = None, min(self._most, length - 1)
        return self._programs[length]

    def _recorded(self, length: int) -> StepProgram:
        tokens = torch.randint(
            self._vocab_size, (1, length), device="cpu", generator=torch.Generator().manual_seed(length)
        )
        prompt, inputs = FlatCall(self.model, self._states, "hidden").eval(), [tokens, *tensors(self._like)]
        with torch.inference_mode(False), torch.no_grad(), torch.autocast("cpu", enabled=False):
            program = StepProgram(lower_step(prompt, inputs))
            results = program.run(inputs)
            if results is not None and self._agrees(results, prompt, inputs):
                return program
        raise StepNotCompiled(f"a compiled prompt of {length} tokens gives other numbers than the model")
