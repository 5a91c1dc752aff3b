"""A model that a server runs: the form that is run, its tokenizer, and what clients are told about it."""

import hashlib
import json
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor, nn

from recurra.checks import sentence
from recurra.data import TextEncoder
from recurra.data.text_start import encode_first, first_tokens
from recurra.decoding import RecordedStep, prepare_for_decoding
from recurra.decoding.linear import MOST_VECTORS
from recurra.decoding.recorded_step import recorded_rows
from recurra.generation.choosing import RowChoice, choose
from recurra.generation.feeding import require_evaluation_mode
from recurra.generation.model_identity import ModelIdentity
from recurra.generation.sampling import SamplingConfig
from recurra.generation.text import TextPieces
from recurra.models.transitions import mixers_with_transition
from recurra.serving.errors import ApiError
from recurra.serving.place import Place
from recurra.state import n_bytes


def _digest(identity: ModelIdentity) -> str:
    """One word for a model: its class, its settings and its weights."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


class ServedModel:
    """A model in the form that serves streams, and its name.

    Args:
        name: what requests call it.
        model: a language model in evaluation mode.
        tokenizer: turns text into its tokens; None for a model that reads numbers.
        weights: how its weights are kept (see `recurra.decoding`); None runs the model as it is.
        task: what its tokens are, as the explorer has to know (see `recurra.training.Task.explored`).
        chat_template: a Jinja template of a chat, as transformers uses them.

    Raises:
        ValueError: the model is in training mode, or cannot be prepared with these weights.
    """

    def __init__(
        self,
        name: str,
        model: nn.Module,
        tokenizer: TextEncoder | None = None,
        *,
        weights: str | None = None,
        task: dict[str, Any] | None = None,
        chat_template: str | None = None,
    ) -> None:
        require_evaluation_mode(model)
        self.name, self.tokenizer, self.weights, self.chat_template = name, tokenizer, weights, chat_template
        self.task = task
        self.fingerprint = _digest(ModelIdentity.of(model))
        self.runner: nn.Module = model if weights is None else prepare_for_decoding(model, weights)
        self.plain = cast(Any, self.runner.model if isinstance(self.runner, RecordedStep) else self.runner)
        self.config: Any = self.plain.config
        self.vocabulary = int(self.config.vocab_size)
        with torch.inference_mode():
            self.start = Place(self.plain.initial_state(1))
            _, state = self.runner(torch.zeros(1, 1, dtype=torch.int64), self.start.state)
            self.outputs = len(self.runner(torch.zeros(1, 1, dtype=torch.int64), state)[0].flatten())
        self.state_bytes = n_bytes(state)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Record steps of all sizes of a batch, and compile the choice of tokens, now: no stream waits for it later."""
        like = self.runner(torch.zeros(1, 1, dtype=torch.int64), self.start.state)[0][:, 0]
        choose(like, [RowChoice(SamplingConfig(), torch.Generator())])
        if isinstance(self.runner, RecordedStep):
            for rows in sorted({recorded_rows(rows) for rows in range(1, MOST_VECTORS + 1)}):
                self.runner.program(rows)

    @property
    def predicts_tokens(self) -> bool:
        """Whether its outputs are tokens that it can read, so that it can generate."""
        return self.outputs == self.vocabulary

    @cached_property
    def gate_layers(self) -> dict[int, int]:
        """The layers whose mixer has a transition for single steps, with the number of its channels."""
        if not hasattr(self.plain, "blocks"):
            return {}
        mixers = mixers_with_transition(self.plain, step_by_step=True)
        return {layer: self._channels(mixer) for layer, mixer in mixers.items()}

    def _channels(self, mixer: nn.Module) -> int:
        with torch.inference_mode():
            like = next(iter((*mixer.parameters(), *mixer.buffers())))
            dtype = like.dtype if like.is_floating_point() else torch.float32  # int8 weights take float32
            x = torch.zeros(1, 1, int(self.config.d_model), dtype=dtype)
            magnitude = mixer.transition(x)[0]  # type: ignore[operator]
        return int(magnitude.shape[-1])

    def encode(self, text: str, *, is_first: bool) -> list[int]:
        """Give a text's tokens; is_first: it begins a stream. Raises ApiError if the model has no tokenizer."""
        if self.tokenizer is None:
            raise ApiError(400, sentence("prompt", "a text", "token ids", f"{self.name} has no tokenizer"))
        return (encode_first(self.tokenizer, text) if is_first else self.tokenizer.encode(text)).tolist()

    def text_of(self, token: int) -> str:
        """Give the text of one token; for a model without a tokenizer, its number."""
        return str(token) if self.tokenizer is None else self.tokenizer.decode([token])

    def pieces(self, before: Sequence[int]) -> Callable[[int], str]:
        """Give a function from tokens that follow `before`, one after the other, to the text that each settles."""
        return str if self.tokenizer is None else TextPieces(self.tokenizer, before).add

    def first_tokens(self) -> list[int]:
        """What a stream begins with that was given nothing to read. Raises ApiError if the model needs something."""
        tokens = [] if self.tokenizer is None else first_tokens(self.tokenizer)
        if not tokens:
            raise ApiError(400, sentence("prompt", "empty", f"at least one token for {self.name} to continue"))
        return tokens

    def require_tokens(self, tokens: list[int]) -> None:
        """Raise ApiError if a token is not in the vocabulary."""
        wrong = next((token for token in tokens if not 0 <= token < self.vocabulary), None)
        if wrong is not None:
            message = sentence("tokens", f"a list with {wrong}", f"tokens from 0 to {self.vocabulary - 1}")
            raise ApiError(400, message)

    @torch.inference_mode()
    def read(self, tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Read tokens (B, L); give what the head reads after each, and the state."""
        return self.runner.hidden(tokens, state)  # type: ignore[operator]

    @torch.inference_mode()
    def head(self, hidden: Tensor) -> Tensor:
        """Give the logits of what `read` gave."""
        return self.runner.head(hidden)  # type: ignore[operator]

    @property
    def cache_bytes_per_token(self) -> int:
        """What a key-value cache of float16 would take for a token, in as many layers as wide."""
        layers, width = (int(getattr(self.config, name, 0)) for name in ("n_layer", "d_model"))
        return 2 * layers * width * 2

    def description(self) -> dict[str, Any]:
        """What clients are told about it."""
        layers, width = (int(getattr(self.config, name, 0)) for name in ("n_layer", "d_model"))
        return {
            "task": self.task,
            "weights": self.weights or "as trained",
            "vocabulary": self.vocabulary,
            "outputs": self.outputs,
            "predicts": "tokens" if self.predicts_tokens else "classes",
            "has_tokenizer": self.tokenizer is not None,
            "has_chat_template": self.chat_template is not None,
            "layers": layers,
            "width": width,
            "state_bytes": self.state_bytes,
            "cache_bytes_per_token": self.cache_bytes_per_token,
            "gates": [{"layer": layer, "channels": channels} for layer, channels in self.gate_layers.items()],
        }
