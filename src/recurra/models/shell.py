"""The base class of language models: tokens in, logits or losses out, and any body over time in between."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from recurra.checks import kind_of, require_numbers, require_tensor, sentence
from recurra.layers.cross_entropy import cross_entropy
from recurra.layers.embeddings import IGNORED_TARGET, counted_targets, counted_tokens, require_targets, require_tokens
from recurra.layers.experts import Routing
from recurra.lengths import check_lengths, mask_fill, on_host, run_lengths, run_resets
from recurra.mixers.base import with_zero_gradients
from recurra.state import Ragged


def negative_log_likelihood(logits: Float[Tensor, "B L V"], targets: Int[Tensor, "B L"]) -> Float[Tensor, "B L"]:
    """Return -log softmax(logits)[target] in nats, in float32 or better; `IGNORED_TARGET` gives 0.

    Raises IndexError if a target is not below V.
    """
    require_tokens("targets", targets.where(targets != IGNORED_TARGET, 0), logits.shape[-1])
    return cross_entropy(logits.flatten(0, 1), targets.flatten()).view_as(targets)


class LanguageModelShell(nn.Module, ABC):
    """Base class of language models.

    A model sets `config` (with `vocab_size`), `embedding`, `blocks` and `head`, and defines `enter`, `body`, `losses`,
    `initial_state` and `require_state`.
    """

    forms_logits: ClassVar[bool] = True
    """Whether `loss` computes the logits of all classes anyway, so that predictions and accuracy cost nothing extra."""
    body_takes_lengths: ClassVar[bool] = False
    """Whether `body` takes `mask` and `cu_seqlens`. If not, sequences of different lengths run in pieces."""
    config: Any
    embedding: nn.Module
    blocks: nn.ModuleList
    head: nn.Module

    def embed(self, tokens: Int[Tensor, "B L"]) -> Float[Tensor, "B L d_model"]:
        """Look tokens up, dropouts included."""
        try:
            x = self.embedding(tokens)
        except IndexError:
            require_tokens("tokens", tokens, self.config.vocab_size)
            raise
        return self.enter(x, tokens)

    def enter(self, x: Float[Tensor, "B L d_model"], tokens: Tensor | None = None) -> Tensor:
        """Apply what follows the embedding: a norm, dropouts. `tokens` are None for vectors that are no token's."""
        return x

    @abstractmethod
    def body(self, x: Float[Tensor, "B L d_model"], state: Any, **options: Any) -> tuple[Tensor, Any]:
        """Run the stack over at least one step; return what the head reads, (B, L, d_model), and the next state.

        `options` go to `run_blocks`: `entering`, and if it `body_takes_lengths` those.
        """

    def run_blocks(
        self,
        x: Float[Tensor, "B M d_model"],
        layers: Sequence[Any],
        entering: list[Tensor] | None = None,
        tokens: slice = slice(None),
        **options: Any,
    ) -> tuple[Float[Tensor, "B M d_model"], tuple[Any, ...]]:
        """Run the blocks one after the other, continuing from the states `layers`; `options` are their arguments.

        A list `entering` takes what enters each block: the steps of x that are `tokens`, not memory.
        """
        next_layers = []
        for block, layer in zip(self.blocks, layers):
            if entering is not None:
                entering.append(x[:, tokens])
            x, layer = block(x, layer, **options)
            next_layers.append(layer)
        return x, tuple(next_layers)

    @abstractmethod
    def losses(self, hidden: Float[Tensor, "B L d_model"], targets: Int[Tensor, "B L"]) -> Float[Tensor, "B L"]:
        """Return -log p(target) in nats for what the head reads; `IGNORED_TARGET` gives 0."""

    @abstractmethod
    def initial_state(self, batch: int) -> Any:
        """Return the state of `batch` streams at their start, on the model's device."""

    @abstractmethod
    def require_state(self, state: Any, batch: int) -> None:
        """Refuse anything but a state of `batch` streams that this model could have returned.

        Raises TypeError or ValueError.
        """

    def forward(
        self,
        tokens: Int[Tensor, "B L"],
        state: Any = None,
        *,
        mask: Bool[Tensor, "B L"] | None = None,
        cu_seqlens: Int[Tensor, " borders"] | None = None,
        reset: Bool[Tensor, "B L"] | None = None,
    ) -> tuple[Float[Tensor, "B L classes"], Any]:
        """Return the logits after every token, continuing from `state`.

        With an adaptive softmax (`cutoffs`) they are log-probabilities, in float32 also under autocast.

        Args:
            tokens: token ids, for any number of steps.
            state: the state after the previous steps; None starts a stream.
            mask: True where a token counts. Padding changes nothing, and its logits are zeros, but its ids must be in
                the vocabulary all the same, or `IGNORED_TARGET`. If the state's layout depends on the position in a
                segment, the next state is `recurra.state.Ragged`.
            cu_seqlens: the offsets of N packed sequences in tokens (1, T); the state has batch N.
            reset: True at the first token of each new sequence, as if the stream were cut there. The next state is that
                of the last sequence. Cannot be combined with `cu_seqlens`.

        Raises:
            IndexError: a token is not in the vocabulary.
            TypeError, ValueError: an argument does not fit, or the state belongs to another module.
        """
        hidden, state = self.hidden(tokens, state, mask=mask, cu_seqlens=cu_seqlens, reset=reset)
        return mask_fill(self.head(hidden), mask, 0), state

    def loss(
        self,
        tokens: Int[Tensor, "B L"],
        targets: Int[Tensor, "B L"],
        state: Any = None,
        *,
        mask: Bool[Tensor, "B L"] | None = None,
        cu_seqlens: Int[Tensor, " borders"] | None = None,
        reset: Bool[Tensor, "B L"] | None = None,
    ) -> tuple[Float[Tensor, "B L"], Any]:
        """Return the negative log-likelihood of every target in nats, continuing from `state`.

        Other arguments and errors are those of `forward`. A target of `IGNORED_TARGET`, like padding, gives 0.
        """
        hidden, state = self.hidden(tokens, state, mask=mask, cu_seqlens=cu_seqlens, reset=reset)
        require_targets(targets, hidden.shape[:2])
        return self.losses(hidden, counted_targets(targets, mask)), state

    def hidden(
        self,
        tokens: Int[Tensor, "B L"] | Float[Tensor, "B L d_model"],
        state: Any = None,
        *,
        mask: Bool[Tensor, "B L"] | None = None,
        cu_seqlens: Int[Tensor, " borders"] | None = None,
        reset: Bool[Tensor, "B L"] | None = None,
        routing: list[Routing] | None = None,
    ) -> tuple[Float[Tensor, "B L d_model"], Any]:
        """Return what the head reads after every token; arguments and errors as `forward`.

        In place of tokens it takes vectors, such as `embedding` makes of them. In a model with mixtures of experts, the
        list `routing` takes what their routers decide, block by block, for `load_balancing_loss`.
        """
        run = self._run if routing is None else partial(self._run, routing=routing)
        return self._over_lengths(run, tokens, state, mask, cu_seqlens, reset)

    def hidden_states(
        self, tokens: Int[Tensor, "B L"] | Float[Tensor, "B L d_model"], state: Any = None, **lengths: Tensor | None
    ) -> tuple[Float[Tensor, "B L depth d_model"], Any]:
        """Return what enters each block and, last, what `hidden` returns; arguments and errors as there."""
        return self._over_lengths(self._run_deep, tokens, state, **lengths)

    def _over_lengths(
        self,
        run: Callable[..., tuple[Tensor, Any]],
        tokens: Tensor,
        state: Any,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        reset: Tensor | None = None,
    ) -> tuple[Tensor, Any]:
        _check_tokens(tokens)
        if tokens.device.type == "meta":
            require_numbers("tokens", tokens, next(self.parameters()))
        if reset is not None:
            again = partial(self._over_lengths, run)
            return run_resets(again, tokens, state, reset, mask=mask, cu_seqlens=cu_seqlens)
        if mask is None and cu_seqlens is None and not isinstance(state, Ragged):
            return run(tokens, state)
        cu_seqlens = None if cu_seqlens is None else on_host(cu_seqlens)  # once, not in every block
        check_lengths(tokens, mask, cu_seqlens)
        if tokens.dim() == 2:
            tokens = counted_tokens(tokens, mask, self.config.vocab_size)
        else:
            tokens = mask_fill(tokens, mask, 0)
        if self.body_takes_lengths and not isinstance(state, Ragged):
            return run(tokens, state, mask=mask, cu_seqlens=cu_seqlens)
        return run_lengths(run, tokens, state, mask=mask, cu_seqlens=cu_seqlens)

    def _run(self, tokens: Tensor, state: Any, **options: Any) -> tuple[Tensor, Any]:
        x = self.embed(tokens) if tokens.dim() == 2 else self.enter(tokens)
        if tokens.shape[1] or "mask" in options:
            return self.body(x, state, **options)
        x = with_zero_gradients(x, self.parameters())
        if state is None:
            return x, self.initial_state(len(tokens))
        self.require_state(state, len(tokens))
        return x, state

    def _run_deep(self, tokens: Tensor, state: Any, **lengths: Any) -> tuple[Tensor, Any]:
        entering: list[Tensor] = []
        y, state = self._run(tokens, state, entering=entering, **lengths)
        n_layer = len(self.blocks)
        # A model that reads segments runs its blocks once for each.
        depths = [torch.cat(entering[block::n_layer] or [y], 1)[..., : y.shape[-1]] for block in range(n_layer)]
        return mask_fill(torch.stack([*depths, y], 2), lengths.get("mask"), 0), state

    @property
    def kind(self) -> str:
        """What tables of models call it."""
        return type(self).__name__

    @property
    def published_row(self) -> str | None:
        """The row of CRT Table 1 that counts its cost; None if none does."""
        return None

    def why_not_exportable(self) -> str:
        """Say why no graph of this model serves any number of tokens; empty if one does."""
        return "its state grows within a segment, and a call takes another way at the end of one"


def require_layers(state: Any, kind: type[Any], n_layer: int) -> tuple[Any, ...]:
    """Return the layers of a model's state."""
    hint = "pass the state that this model returned for these streams"
    if type(state) is not kind:
        raise TypeError(sentence("state", kind_of(state), f"a {kind.__name__}, or None to start", hint))
    layers: tuple[Any, ...] = state.layers
    if len(layers) != n_layer or any(layer is None for layer in layers):
        got = f"{len(layers)} states" + (", None among them" if None in layers else "")
        raise ValueError(f"state.layers has {got}; expected one state for each of {n_layer} layers: {hint}")
    return layers


def _check_tokens(tokens: Any) -> None:
    require_tensor("tokens", tokens)
    is_ids = tokens.dim() == 2 and tokens.dtype in (torch.int32, torch.int64)
    if not is_ids and not (tokens.dim() == 3 and tokens.is_floating_point()):
        expected = "int64 token ids of shape (batch, steps), or vectors of shape (batch, steps, d_model)"
        raise ValueError(sentence("tokens", kind_of(tokens), expected))


_checkpoint = partial(checkpoint, use_reentrant=False)


def recompute(block: nn.Module, checkpoint: Callable[..., Any] = _checkpoint) -> None:
    """Activation checkpointing: let a block store its inputs alone and recompute the rest in the backward pass."""
    # A partial of a bound method, because copies of the model then call their own blocks.
    block.forward = partial(_recomputed, block.forward, checkpoint)


def keep_activations(block: nn.Module) -> None:
    """Undo `recompute`."""
    if isinstance(block.forward, partial) and block.forward.func is _recomputed:
        block.forward = block.forward.args[0]


def _recomputed(forward: Callable[..., Any], checkpoint: Callable[..., Any], *given: Any, **named: Any) -> Any:
    return checkpoint(forward, *given, **named) if torch.is_grad_enabled() else forward(*given, **named)


def acts_on_calls(module: nn.Module) -> bool:
    """Whether calling the module does more than its class: it has hooks, or a `forward` of its own."""
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))


def mixers_with_transition(model: nn.Module) -> dict[int, nn.Module]:
    """Return the mixers with a method `transition(x) -> (magnitude, phase)` by the number of their block, from 0."""
    blocks: Any = getattr(model, "blocks", ())
    mixers = {layer: block.mixer for layer, block in enumerate(blocks) if hasattr(block, "mixer")}
    return {layer: mixer for layer, mixer in mixers.items() if callable(getattr(mixer, "transition", None))}


def transition_of(mixer: nn.Module, x: Tensor, state: Any = None) -> tuple[Tensor, Tensor]:
    """Return the transition that a mixer with one applies to x after `state`: |a| and the phase, in float32."""
    given = (x, state) if getattr(mixer, "transition_looks_back", False) else (x,)
    magnitude, phase = mixer.transition(*given)  # type: ignore[operator]
    return magnitude.float(), phase.float()


def evenly_spaced(n_channels: int, most: int) -> list[int]:
    """Choose the channels of a transition that are shown: all, or `most` of them from the first to the last."""
    count = min(n_channels, most)
    return [round(place * (n_channels - 1) / max(count - 1, 1)) for place in range(count)]


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put a model in evaluation mode, and restore the mode of each of its modules afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
