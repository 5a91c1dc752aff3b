"""The recurrent language model: any registered mixer between an embedding and a head (GateLoop App. C, Figure 10)."""

import inspect
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from recurra.checks import (
    choose,
    require,
    require_at_least,
    require_positive,
    require_probability,
    require_whole_number,
    sentence,
)
from recurra.layers.dropout import ScaledDropout
from recurra.layers.experts import MixtureOfExperts, Routing
from recurra.layers.feed_forward import FEED_FORWARDS, LinearWeights, TiedLinear
from recurra.layers.norms import NORMS
from recurra.layers.softmax import CappedHead, ScaledEmbedding, ScaledHead
from recurra.lengths import mask_fill
from recurra.mixers.base import Mixer, _mixers, create_mixer, mixer_options
from recurra.models.registry import ModelConfig, Size, from_data, register_model
from recurra.models.shell import LanguageModelShell, negative_log_likelihood, require_layers
from recurra.state import Ragged, require_streams


class MixerBlock(nn.Module):
    """x = x + TimeMixing(norm(x)). Pre-norm is our choice; the paper leaves it open.

    A `norm_place` of "after" makes this x = x + norm(TimeMixing(x)), as in OLMo 2 (arXiv 2501.00656, section 3.2), and
    "stream" makes it x = norm(x); x = x + TimeMixing(x), as in MiniMax-01 (arXiv 2501.08313).

    Args:
        mixer: the time mixing layer, `(x, state) -> (y, state)`.
        norm: the norm before it.
        dropout: probability of dropping a channel of what the block adds to x.
        scale: what that is multiplied by.
    """

    norm_place = "before"

    def __init__(self, mixer: Mixer, norm: nn.Module, dropout: float = 0.0, scale: float = 1.0) -> None:
        super().__init__()
        self.norm_mixing = norm
        self.mixer: Mixer = mixer
        self.dropout = nn.Dropout(dropout) if scale == 1 else ScaledDropout(dropout, scale)

    def forward(
        self,
        x: Float[Tensor, "B L d_model"],
        state: Any = None,
        routing: list[Routing] | None = None,
        **lengths: Any,
    ) -> tuple[Float[Tensor, "B L d_model"], Any]:
        """Apply the block, continuing from the mixer's `state`; None is the start of a stream.

        `lengths` are the mixer's `mask` or `cu_seqlens`; x at padding must be finite. What x has beyond d_model
        channels is for mixers alone (`Mixer.d_carried`), and passes through the block if its mixer takes none. The list
        `routing` receives the router's decisions, if the block has a mixture of experts.
        """
        carried = None
        if x.shape[-1] > self.mixer.d_model:
            x, carried = x.tensor_split([self.mixer.d_model], -1)
        stream, entering = self._enter(self.norm_mixing, x)
        if carried is None or not self.mixer.d_carried:
            mixed, state = self.mixer(entering, state, **lengths)
        else:
            mixed, state = self.mixer(torch.cat([entering, carried], -1), state, **lengths)
            mixed, carried = mixed.tensor_split([self.mixer.d_model], -1)
        x = self._mix_channels(stream + self._leave(self.norm_mixing, mixed), routing, lengths.get("mask"))
        return x if carried is None else torch.cat([x, carried], -1), state

    def _enter(self, norm: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the residual stream and a layer's input."""
        entering = x if self.norm_place == "after" else norm(x)
        return entering if self.norm_place == "stream" else x, entering

    def _leave(self, norm: nn.Module, mixed: Tensor) -> Tensor:
        """Return what a layer adds to the stream."""
        added: Tensor = self.dropout(norm(mixed) if self.norm_place == "after" else mixed)
        return added

    def _mix_channels(self, x: Tensor, routing: list[Routing] | None, mask: Tensor | None) -> Tensor:
        return x

    @torch.no_grad()
    def scale_outputs(self, scale: float) -> None:
        """Multiply the weights that write to the residual stream; used only for initialisation."""
        if self.norm_place == "after":  # the norms' weights alone set the scale
            for norm in (self.norm_mixing, self.norm_feed_forward):
                norm.weight.mul_(scale)  # type: ignore[operator, union-attr]
            return
        feed_forward = getattr(self, "feed_forward", None)
        for part in (self.mixer, feed_forward, getattr(feed_forward, "shared", None)):
            projection = getattr(part, "output_projection", None)
            if projection is not None:
                projection.weight.mul_(scale)


class Block(MixerBlock):
    """x = x + TimeMixing(norm(x)); x = x + FFN(norm(x)).

    Arguments as for `MixerBlock`, and the feed-forward network with its norm.
    """

    def __init__(
        self,
        mixer: Mixer,
        norm: nn.Module,
        feed_forward: nn.Module,
        norm_feed_forward: nn.Module,
        dropout: float = 0.0,
        scale: float = 1.0,
    ) -> None:
        super().__init__(mixer, norm, dropout, scale)
        self.norm_feed_forward = norm_feed_forward
        self.feed_forward = feed_forward

    def _mix_channels(self, x: Tensor, routing: list[Routing] | None, mask: Tensor | None) -> Tensor:
        stream, entering = self._enter(self.norm_feed_forward, x)
        options = (routing, mask) if isinstance(self.feed_forward, MixtureOfExperts) else ()
        return stream + self._leave(self.norm_feed_forward, self.feed_forward(entering, *options))


_NORM_PLACES = ("before", "after", "stream")
_FEED_FORWARDS = {**FEED_FORWARDS, "mixture-of-experts": MixtureOfExperts}
_EXPERT_OPTIONS = {
    name: one.default
    for name, one in inspect.signature(MixtureOfExperts).parameters.items()
    if one.kind is one.KEYWORD_ONLY and name != "biases"
}


@dataclass(frozen=True)
class LanguageModelConfig(ModelConfig):
    """A recurrent language model; the data determine its vocabulary size."""

    vocab_size: Size = from_data()
    """Number of input tokens; null: as in the data."""
    output_size: int | None = from_data(optional=True)
    """Number of output tokens; null: as in the data, or else vocab_size."""
    n_layer: int = 4
    """Blocks, each a time mixing and a channel mixing layer."""
    d_model: int = 64
    """Channels of the residual stream."""
    d_channel_mixing: int = 128
    """Hidden channels of the feed-forward networks; 0 for blocks with only time mixing."""
    mixer: str | list[str] = "gateloop"
    """The time mixing layer by its registered name, one for all blocks or one per block; `recurra info` lists them."""
    mixer_options: dict[str, Any] = field(default_factory=dict)
    """Options of the time mixing layer; for gateloop: d_qk, d_v, n_heads, transition, magnitude_activation,
    phase_activation, phase_scale, ring, output_gate. If mixer is a list: the options of each mixer by its name."""
    feed_forward: str | list[str] = "gelu"
    """The feed-forward networks: "gelu" or "relu-squared", or with gates "swiglu", "geglu" or "geglu-tanh", which
    approximates GELU, or "mixture-of-experts"; one for all blocks or one per block, where "none" is no network."""
    feed_forward_options: dict[str, Any] = field(default_factory=dict)
    """Options of "mixture-of-experts": n_experts, top_k, d_expert (d_channel_mixing unless given), d_shared,
    shared_gate, expert, d_latent, router, normalise, epsilon, n_groups, top_groups, scale."""
    norm: str = "layer"
    """The norms of all layers and before the head: "layer" or "rms"."""
    norm_place: str | list[str] = "before"
    """Where the norms of a block are: "before" its time mixing and its feed-forward network, or "after" both, as in
    OLMo 2, or in the residual "stream" before both, as in MiniMax-01; one for all blocks or one per block. Blocks with
    "after" need a dense feed-forward network, and those with "stream" one or a mixture of experts."""
    norm_epsilon: float = 1e-5
    """Added to the mean square in the norms."""
    biases: bool = True
    """Give the feed-forward networks and the head biases; experts and a head that is the embedding never have one."""
    tie_embeddings: bool = False
    """Also use the token embedding as the output matrix."""
    embedding_scale: float = 1.0
    """Multiplies embedded tokens."""
    residual_scale: float = 1.0
    """Multiplies what each half of a block adds, in training and afterwards."""
    residual_init_scale: float = 1.0
    """Multiplies the initial last weights of each half of a block: those of the feed-forward network and of the mixer's
    output projection, if it has one. With 0, such blocks begin as the identity."""
    embedding_norm: bool = False
    """Normalise embedded tokens, as RWKV does."""
    logit_scale: float = 1.0
    """Multiplies the logits, before they are bounded."""
    logit_cap: float | None = None
    """Bound of the logits, cap * tanh(logit / cap); none if None."""
    dropout: float = 0.0
    """Probability of dropping a channel of the embedding, of what each half of a block adds, or of the hidden channels
    of the feed-forward networks, but for experts."""

    def __post_init__(self) -> None:
        require_whole_number(1, n_layer=self.n_layer, d_model=self.d_model, **self.given_sizes())
        require_whole_number(0, d_channel_mixing=self.d_channel_mixing)
        require_at_least(0, residual_init_scale=self.residual_init_scale)
        require_probability(dropout=self.dropout)
        self._check_feed_forwards()
        choose("norm", NORMS, self.norm)
        require_positive(norm_epsilon=self.norm_epsilon, embedding_scale=self.embedding_scale)
        require_positive(residual_scale=self.residual_scale, logit_scale=self.logit_scale)
        if self.tie_embeddings and self.output_size not in (None, self.vocab_size):
            expected = f"vocab_size = {self.vocab_size}, as tie_embeddings is set"
            raise ValueError(sentence("output_size", self.output_size, expected))
        if self.logit_cap is not None:
            require_positive(logit_cap=self.logit_cap)
        if isinstance(self.mixer, str):
            return
        is_list = isinstance(self.mixer, (list, tuple)) and len(self.mixer) == self.n_layer
        require(is_list, "mixer", self.mixer, f"one name for each of n_layer = {self.n_layer}")
        for name, options in self.mixer_options.items():
            names = ", ".join(dict.fromkeys(self.mixer))
            if name not in self.mixer or not isinstance(options, dict):
                expected = f"options by the names of the mixers, {names}"
                raise ValueError(sentence("mixer_options", f"{{{name!r}: {options!r}}}", expected))

    def _check_feed_forwards(self) -> None:
        networks, places, n_layer = self.feed_forward, self.norm_place, self.n_layer
        for field_name, given, what in (("feed_forward", networks, "name"), ("norm_place", places, "place")):
            one_each = isinstance(given, str) or len(given) == n_layer
            require(one_each, field_name, given, f"one {what} for each of n_layer = {n_layer}")
        # one for all blocks is checked once: n_layer may be a number of a file, and too large for a list
        is_one = isinstance(networks, str) and isinstance(places, str)
        pairs = [(networks, places)] if is_one else list(zip(self.feed_forwards, self.norm_places))
        for name, place in pairs:
            choose("feed_forward", {**_FEED_FORWARDS, "none": None}, name)
            choose("norm_place", dict.fromkeys(_NORM_PLACES), place)
            has_network = self.d_channel_mixing > 0 and name != "none"
            places = ["before", "stream"] if name == "mixture-of-experts" else list(_NORM_PLACES)
            places = places if has_network else ["before"]
            expected = " or ".join(map(repr, places)) + f" with {name if has_network else 'no feed-forward network'}"
            require(place in places, "norm_place", place, expected)
        names = [name for name, _ in pairs]
        require(
            isinstance(self.feed_forward_options, dict), "feed_forward_options", self.feed_forward_options, "a dict"
        )
        for option in self.feed_forward_options:
            choose("an option in feed_forward_options", _EXPERT_OPTIONS, option)
        applies = self.d_channel_mixing > 0 or set(names) <= {"gelu"}
        require(applies, "feed_forward", self.feed_forward, "'gelu' with d_channel_mixing = 0, which has none")
        applies = "mixture-of-experts" in names or not self.feed_forward_options
        require(applies, "feed_forward_options", self.feed_forward_options, "none without a mixture-of-experts")

    @property
    def feed_forwards(self) -> list[str]:
        """The name of the feed-forward network of every block."""
        return [self.feed_forward] * self.n_layer if isinstance(self.feed_forward, str) else self.feed_forward

    @property
    def norm_places(self) -> list[str]:
        """Where the norms of every block are."""
        return [self.norm_place] * self.n_layer if isinstance(self.norm_place, str) else self.norm_place

    @property
    def mixers(self) -> list[tuple[str, dict[str, Any]]]:
        """The mixer's name and options for every block."""
        if isinstance(self.mixer, str):
            return [(self.mixer, self.mixer_options)] * self.n_layer
        return [(name, self.mixer_options.get(name, {})) for name in self.mixer]


class LanguageModelState(NamedTuple):
    """One state per block, in the blocks' order."""

    layers: tuple[Any, ...]


@register_model("recurrent", config=LanguageModelConfig)
class LanguageModel(LanguageModelShell):
    """Embedding without positional encoding, a stack of mixers, a final norm and a linear head.

    Weights are drawn from N(0, 1 / fan-in) and biases start at 0 (our choice; the paper does not say).
    """

    body_takes_lengths = True

    def __init__(self, config: LanguageModelConfig) -> None:
        super().__init__()
        config.require_sizes()
        self.config = config
        self.embedding = _embedding(config)
        self.embedding_norm = _norm(config) if config.embedding_norm else nn.Identity()
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(
            _block(create_mixer(name, config.d_model, **options), feed_forward, place, config)
            for (name, options), feed_forward, place in zip(
                _numbered(config.mixers), config.feed_forwards, config.norm_places
            )
        )
        mixers = [cast(MixerBlock, block).mixer for block in self.blocks]
        self.d_carried = max(mixer.d_carried for mixer in mixers)
        kinds = {mixer.takes_stream: name for mixer, (name, _) in zip(mixers, config.mixers) if mixer.d_carried}
        require(len(kinds) < 2, "mixer", config.mixer, f"not both {' and '.join(kinds.values())}, which carry channels")
        self.carries_embedding = True in kinds
        for number, mixer in enumerate(mixers):
            mixer.share([one for one in mixers[:number] if type(one) is type(mixer)])
        self.norm = _norm(config)
        kind, bias = (TiedLinear, False) if config.tie_embeddings else (nn.Linear, config.biases)
        linear = kind(config.d_model, config.output_size or config.vocab_size, bias=bias)
        head = linear if config.logit_scale == 1 else ScaledHead(linear, config.logit_scale)
        self.head: nn.Module = head if config.logit_cap is None else CappedHead(head, config.logit_cap)
        self.apply(_initialise)
        for block in self.blocks:
            block.scale_outputs(config.residual_init_scale)  # type: ignore[operator]
        if config.tie_embeddings:
            linear.weight = self.embedding.weight

    @property
    def kind(self) -> str:
        """The model's name in tables."""
        return f"language model ({', '.join(dict.fromkeys(name for name, _ in self.config.mixers))})"

    def enter(self, x: Float[Tensor, "B L d_model"], tokens: Tensor | None = None) -> Tensor:
        """Normalise embedded tokens if the configuration says so."""
        entered: Tensor = self.dropout(self.embedding_norm(x))
        return entered

    def body(
        self, x: Float[Tensor, "B L d_model"], state: LanguageModelState | None, **options: Any
    ) -> tuple[Float[Tensor, "B L d_model"], LanguageModelState]:
        """Run the stack of mixers and the final norm."""
        n_layer = len(self.blocks)
        layers = (None,) * n_layer if state is None else require_layers(state, LanguageModelState, n_layer)
        if self.d_carried:
            x = torch.cat([x, x], -1) if self.carries_embedding else functional.pad(x, (0, self.d_carried))
        x, next_layers = self.run_blocks(x, layers, **options)
        x = self.norm(x[..., : self.config.d_model])
        return mask_fill(x, options.get("mask"), 0), LanguageModelState(next_layers)

    def losses(self, hidden: Float[Tensor, "B L d_model"], targets: Int[Tensor, "B L"]) -> Float[Tensor, "B L"]:
        """Return -log softmax(head(hidden))[target]."""
        return negative_log_likelihood(self.head(hidden), targets)

    def initial_state(self, batch: int) -> LanguageModelState:
        """Return one initial state per block."""
        return LanguageModelState(tuple(block.mixer.initial_state(batch) for block in self.blocks))  # type: ignore

    def require_state(self, state: Any, batch: int) -> None:
        """Check the state of every block."""
        if isinstance(state, Ragged):
            require_streams(self.require_state, state, batch)
            return
        layers = require_layers(state, LanguageModelState, len(self.blocks))
        for block, layer in zip(self.blocks, layers):
            block.mixer.require_state(layer, batch)  # type: ignore[operator, union-attr]

    def why_not_exportable(self) -> str:
        """Return the first mixer's reason; empty if all mixers can be exported."""
        for number, block in enumerate(self.blocks):
            if reason := block.mixer.why_not_exportable():  # type: ignore[operator, union-attr]
                return f"the mixer of block {number}: {reason}"
            if isinstance(getattr(block, "feed_forward", None), MixtureOfExperts):
                return f"block {number} chooses experts, and what it computes depends on the numbers in it"
        return ""


def _numbered(mixers: list[tuple[str, dict[str, Any]]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Tell each mixer that has an option `layer` which of its name it is, from 1, if there are several or it asks."""
    names, counts = [name for name, _ in mixers], Counter[str]()
    for name, options in mixers:
        counts[name] += 1
        is_needed = len(names) > 1 and _mixers[name].takes_stream
        is_numbered = is_needed or (names.count(name) > 1 and "layer" in mixer_options(name))
        yield name, {**options, "layer": counts[name]} if is_numbered else options


def _embedding(config: LanguageModelConfig) -> nn.Embedding:
    if config.embedding_scale == 1:
        return nn.Embedding(config.vocab_size, config.d_model)
    return ScaledEmbedding(config.vocab_size, config.d_model, config.embedding_scale)


def _norm(config: LanguageModelConfig, mixer: Mixer | None = None) -> nn.Module:
    if mixer is not None and mixer.takes_stream:
        return nn.Identity()
    return NORMS[config.norm](config.d_model, eps=config.norm_epsilon)


def _block(mixer: Mixer, feed_forward: str, place: str, config: LanguageModelConfig) -> MixerBlock:
    added = (config.dropout, config.residual_scale)
    if config.d_channel_mixing == 0 or feed_forward == "none":
        return MixerBlock(mixer, _norm(config, mixer), *added)
    kind = _FEED_FORWARDS[feed_forward]
    is_mixture = kind is MixtureOfExperts
    options = config.feed_forward_options if is_mixture else {}
    network = kind(config.d_model, config.d_channel_mixing, config.dropout, biases=config.biases, **options)
    block = Block(mixer, _norm(config, mixer), network, _norm(config), *added)
    block.norm_place = place
    return block


def _initialise(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, LinearWeights)):
        nn.init.normal_(module.weight, std=module.in_features**-0.5)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=module.embedding_dim**-0.5)
    elif hasattr(module, "reset_parameters"):
        module.reset_parameters()  # type: ignore[operator]  # of a mixer or a transition, whose linear layers came before it
