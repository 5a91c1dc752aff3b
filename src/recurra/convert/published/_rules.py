"""What a converter knows of a published architecture: its config.json, and rules for its weights in both directions."""

import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from recurra._choices import PUBLISHED_CLASSES
from recurra.checks import kind_of, sentence
from recurra.convert.published._settings import Settings
from recurra.layers.experts import MixtureOfExperts
from recurra.mixers.base import mixer_options
from recurra.models.language_model import LanguageModelConfig

_N_SHOWN = 5
EXPERTS = "mixture-of-experts"
SWIGLU = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
"""The layers of a SwiGLU network, as most of transformers' models name them."""
STACK = {
    "embedding": "model.embed_tokens",
    **{f"blocks.#.feed_forward.{own}": f"model.layers.#.mlp.{name}" for own, name in SWIGLU.items()},
    "norm": "model.norm",
    "head": "lm_head",
}
"""The parts around its blocks and its dense networks."""
NORMS = {
    "blocks.#.norm_mixing": "model.layers.#.input_layernorm",
    "blocks.#.norm_feed_forward": "model.layers.#.post_attention_layernorm",
}
"""The norms before a block's halves."""


class Rule(NamedTuple):
    """What a parameter here is made of there."""

    own: str
    """A pattern of the parameter's names here, matched in full."""
    theirs: tuple[str, ...]
    """The names there, with the pattern's groups."""
    read: Callable[..., Tensor] = lambda tensor: tensor
    """Makes the parameter from their tensors."""
    write: Callable[[Tensor], tuple[Tensor, ...]] = lambda tensor: (tensor,)
    """Makes their tensors from the parameter."""


def plain_rules(
    names: Mapping[str, str],
    own: str = "",
    theirs: str = "",
    read: Callable[[Tensor], Tensor] = lambda tensor: tensor,
    write: Callable[[Tensor], tuple[Tensor, ...]] = lambda tensor: (tensor,),
) -> list[Rule]:
    """Make rules for modules and parameters of other names there; `own` and `theirs` stand in front of these."""
    return [
        Rule(
            re.escape(own + ours).replace(r"\#", r"(?P<block>\d+)") + r"(?P<kind>\.weight|\.bias|)",
            ((theirs + name).replace("#", r"\g<block>") + r"\g<kind>",),
            read,
            write,
        )
        for ours, name in names.items()
    ]


class Block(NamedTuple):
    """A block of a stack: its number, its mixer's name and options, with their defaults, and its feed-forward network.

    place: where the block begins in a stack in which each half of a block is a layer.
    has_network: whether it has a feed-forward network.
    d_hidden: hidden channels of a dense network; n_experts, d_expert, d_shared: of a mixture, 0 if it is none.
    part: the part of the mixer to make rules for, with a trailing dot; empty for the whole mixer.
    turns: the numbers of all blocks with the same mixer.

    Its methods make rules for the parameters of the mixer or `part`; `theirs` is the prefix of the published names.
    """

    number: int
    mixer: str
    options: dict[str, Any]
    d_model: int
    place: int = 0
    has_network: bool = True
    d_hidden: int = 0
    n_experts: int = 0
    d_expert: int = 0
    d_shared: int = 0
    part: str = ""
    turns: tuple[int, ...] = ()

    @property
    def own(self) -> str:
        """What the names of the mixer's parameters begin with, or of those of its `part`."""
        return f"blocks.{self.number}.mixer.{self.part}"

    @property
    def own_network(self) -> str:
        """What the names of the feed-forward network's parameters begin with."""
        return f"blocks.{self.number}.feed_forward."

    @property
    def heads(self) -> tuple[int, int, int]:
        """The numbers of query heads and of key and value heads, and the channels of a head."""
        n_heads = self.options["n_heads"]
        return n_heads, self.options.get("n_kv_heads") or n_heads, self.options["d_head"] or self.d_model // n_heads

    @property
    def turned_pairs(self) -> Tensor:
        """For each channel of a head here, its number in the published weights."""
        *_, d_head = self.heads
        n_rotated = int(d_head * self.options["rotated_share"])
        halves = torch.arange(n_rotated).view(2, n_rotated // 2)
        return torch.cat([halves.T.flatten(), torch.arange(n_rotated, d_head)])

    def plain(self, names: Mapping[str, str], theirs: str = "", *conversions: Any) -> list[Rule]:
        """Make rules for parts with other published names; `conversions` are those of a `Rule`."""
        return plain_rules(names, self.own, theirs, *conversions)

    def stacked(self, own: str, theirs: Sequence[str], sizes: Sequence[int]) -> Rule:
        """A parameter whose rows are those of several tensors there, of these sizes, one after the other."""
        pattern = re.escape(self.own + own)
        return Rule(pattern, tuple(theirs), lambda *parts: torch.cat(parts), lambda whole: whole.split(list(sizes)))

    def attention(
        self, theirs: str, queries: str | None = None, output: str = "o_proj", own: str = "qkv"
    ) -> list[Rule]:
        """Make rules for queries, keys and values, which are one matrix here, and for the output projection."""
        (n_heads, n_kv_heads, d_head), order = self.heads, self.turned_pairs
        rows, back = [n * d_head for n in (n_heads, n_kv_heads, n_kv_heads)], torch.argsort(order)

        def read(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return torch.cat([reordered(q, order), reordered(k, order), v])

        def write(qkv: Tensor) -> tuple[Tensor, ...]:
            q, k, v = qkv.split(rows)
            return reordered(q, back), reordered(k, back), v

        names = (queries or f"{theirs}q_proj.weight", f"{theirs}k_proj.weight", f"{theirs}v_proj.weight")
        qkv = Rule(re.escape(f"{self.own}{own}.weight"), names, read, write)
        return [qkv, *self.plain({"output_projection": output}, theirs)]

    def head_norms(self, names: Mapping[str, str], theirs: str, less: float = 0.0) -> list[Rule]:
        """Make rules for norms in each head, whose scales the other code keeps less this number."""
        order = self.turned_pairs
        back = torch.argsort(order)
        return self.plain(names, theirs, lambda x: reordered(x, order) + less, lambda x: (reordered(x, back) - less,))

    def experts(self, theirs: str, names: Mapping[str, str]) -> list[Rule]:
        """Make rules for experts that are networks there, whose names begin with `theirs` and the expert's number."""
        first, down = [names[own] for own in ("gate", "up") if own in names], names["down"]

        def named(*layers: str) -> tuple[str, ...]:
            return tuple(f"{theirs}{number}.{layer}.weight" for number in range(self.n_experts) for layer in layers)

        own = re.escape(f"{self.own_network}experts.")
        return [
            Rule(
                rf"{own}gate_up\.weight",
                named(*first),
                lambda *parts: torch.cat(parts).unflatten(0, (self.n_experts, -1)),
                lambda whole: whole.flatten(0, 1).chunk(len(first) * self.n_experts),
            ),
            Rule(rf"{own}down\.weight", named(down), lambda *parts: torch.stack(parts), lambda whole: whole.unbind()),
        ]


def reordered(weight: Tensor, order: Tensor) -> Tensor:
    """Bring the rows of every head into an order."""
    return weight.unflatten(0, (-1, len(order)))[:, order].flatten(0, 1)


class Fused(NamedTuple):
    """A matrix whose rows are those of one group of heads after the other, and within a group part by part.

    name: the matrix there.
    parts: names for the parts, which rules know as `NAME[PART]`.
    n_groups: groups of heads.
    sizes: rows of every part in one group.
    """

    name: str
    parts: tuple[str, ...]
    n_groups: int
    sizes: tuple[int, ...]

    @property
    def names(self) -> list[str]:
        """What rules call the parts."""
        return [f"{self.name}[{part}]" for part in self.parts]


class Stack:
    """A model's shape, `config`, with the defaults of its mixers' and experts' options filled in."""

    def __init__(self, config: LanguageModelConfig) -> None:
        self.config, self.mixers = config, [name for name, _ in config.mixers]
        self.options = {name: mixer_options(name) | options for name, options in dict(config.mixers).items()}
        known = inspect.signature(MixtureOfExperts).parameters.values()
        own = {one.name: one.default for one in known if one.kind is one.KEYWORD_ONLY and one.name != "biases"}
        self.experts = own | config.feed_forward_options
        self.experts["d_expert"] = self.experts["d_expert"] or config.d_channel_mixing
        self.has_experts = EXPERTS in config.feed_forwards

    def mixer(self, name: str, **absent: Any) -> dict[str, Any]:
        """Return a mixer's options; if no block has it, its defaults with `absent` replacing some of them."""
        return self.options.get(name) or mixer_options(name) | absent

    def heads(self, name: str, **absent: Any) -> tuple[int, int, int]:
        """Return `Block.heads` for the mixer `name`."""
        return Block(0, name, self.mixer(name, **absent), self.config.d_model).heads

    def kinds(self, known: Mapping[str, str]) -> list[str]:
        """Return what config.json calls the mixers of the blocks."""
        names = {name: kind for kind, name in known.items()}
        return [names.get(name, name) for name in self.mixers]

    def attention(self, name: str, **absent: Any) -> dict[str, Any]:
        """The inverse of `Settings.attention`, for the mixer `name`."""
        n_heads, n_kv_heads, d_head = self.heads(name, **absent)
        return {
            "num_attention_heads": n_heads,
            "num_key_value_heads": n_kv_heads,
            "head_dim": d_head,
            "attention_dropout": self.mixer(name, **absent)["dropout"],
        }

    def blocks(self) -> list[Block]:
        """List the blocks."""
        sizes = tuple(self.experts[name] for name in ("n_experts", "d_expert", "d_shared"))
        d_hidden, place, blocks = self.config.d_channel_mixing, 0, []
        for number, (name, kind) in enumerate(zip(self.mixers, self.config.feed_forwards)):
            has_network = d_hidden > 0 and kind != "none"
            network = (place, has_network, d_hidden, *(sizes if kind == EXPERTS else ()))
            turns = tuple(other for other, one in enumerate(self.mixers) if one == name)
            block = Block(number, name, self.options[name], self.config.d_model, *network)
            blocks.append(block._replace(turns=turns))
            place += 1 + has_network
        return blocks


class Architecture(NamedTuple):
    """A published architecture."""

    model_type: str
    """Its name in config.json."""
    mixer: str
    """The mixer here that it is known by."""
    names: Mapping[str, str]
    """Modules and parameters that only have other names there; `#` stands for the number of a block."""
    config: Callable[[Settings, int, int], dict[str, Any]]
    """Makes the shape, as far as `read_config` does not, from config.json and the numbers of channels and blocks."""
    settings: Callable[[Stack], dict[str, Any]]
    """Makes the entries of config.json that `settings_of` does not."""
    rules: Callable[[Block], list[Rule]] = lambda block: []
    """The other weights of a block's mixer."""
    fused: Callable[[Block], list[Fused]] = lambda block: []
    """Matrices there that are split before the rules see them."""
    scales: Mapping[str, str] = {}
    """As `names`, of scales that the other code keeps as their distance from 1."""
    fits: Callable[[Stack], bool] = lambda stack: True
    """Whether a shape with that mixer is of this architecture, where several have the mixer."""
    head: str = "lm_head.weight"
    """The output matrix there, which a folder omits if it is the embedding."""
    tied: bool = False
    """Whether it is the embedding unless config.json says otherwise."""
    other_names: Mapping[str, str] = {}
    """Entries that stand under other names, too: these to the usual ones."""
    counts_layers: bool = True
    """Whether config.json must say how many layers there are, rather than list them."""
    folded: Callable[[Mapping[str, Any], LanguageModelConfig], dict[str, Tensor]] = lambda entries, config: {}
    """What config.json, which has been read, multiplies rows of tensors by, by patterns of their names."""
    other_tensors: Mapping[str, str | None] = {}
    """What names of tensors begin with in other folders, to the usual beginning, or None if the class drops them."""
    other_layout: Callable[[dict[str, Tensor]], dict[str, Tensor]] = lambda weights: weights
    """Brings the tensors of other folders, once their names begin as usual, into the usual layout."""
    derived: Callable[[dict[str, Tensor]], dict[str, Tensor]] = lambda weights: weights
    """Adds tensors that the class keeps too, to those that are written."""

    @property
    def class_name(self) -> str:
        """Transformers' class."""
        return PUBLISHED_CLASSES[self.model_type]


def read_config(architecture: Architecture, settings: Settings) -> LanguageModelConfig:
    """Make a model's shape of its config.json."""
    for other, key in architecture.other_names.items():
        settings.rename(other, key)
    n_layer = settings.size("num_hidden_layers", None if architecture.counts_layers else 1)
    d_model = settings.size("hidden_size")
    shape: dict[str, Any] = {
        "vocab_size": settings.size("vocab_size"),
        "n_layer": n_layer,
        "d_model": d_model,
        "d_channel_mixing": 0,
        "mixer": architecture.mixer,
        "norm": "rms",
        "biases": False,
        "tie_embeddings": settings.flag("tie_word_embeddings", architecture.tied),
        **architecture.config(settings, d_model, n_layer),
    }
    settings.finish()
    return LanguageModelConfig(**shape)


def settings_of(architecture: Architecture, config: LanguageModelConfig) -> dict[str, Any]:
    """Make the entries of config.json that say what a model computes."""
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "num_hidden_layers": config.n_layer,
        "tie_word_embeddings": config.tie_embeddings,
        **architecture.settings(Stack(config)),
    }


def fused_of(architecture: Architecture, config: LanguageModelConfig) -> list[Fused]:
    """List the matrices there that are split before the rules see them."""
    return [fused for block in Stack(config).blocks() for fused in architecture.fused(block)]


def rules_of(architecture: Architecture, config: LanguageModelConfig) -> list[Rule]:
    """Make the rules for all weights."""
    scales = plain_rules(architecture.scales, read=lambda scale: scale + 1, write=lambda scale: (scale - 1,))
    of_blocks = [rule for block in Stack(config).blocks() for rule in architecture.rules(block)]
    return [*scales, *plain_rules(architecture.names), *of_blocks]


def deepseek_experts(settings: Settings, sizes: Mapping[str, tuple[str, int]], scale: float = 1.0) -> dict[str, Any]:
    """Take what says how DeepSeek-V3's mixture of experts computes, from entries of its own names but for the sizes."""
    found = settings.options({**sizes, "normalise": ("norm_topk_prob", True)})
    return {**found, "router": "sigmoid", "epsilon": 1e-20, "scale": settings.positive("routed_scaling_factor", scale)}


def networks_of(kinds: list[str], experts: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of the blocks' feed-forward networks; `experts` are the options of mixtures."""
    kind = kinds[0] if len(set(kinds)) == 1 else kinds
    return {"feed_forward": kind, "feed_forward_options": experts if EXPERTS in kinds else {}}


def rotation_entries(options: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `Settings.rotation`."""
    base, share = options["rotation_base"], options["rotated_share"]
    return {"rope_parameters": {"rope_type": "default", "rope_theta": base, "partial_rotary_factor": share}}


def shape_of(mixers: list[str], options: dict[str, dict[str, Any]], d_hidden: int, epsilon: float) -> dict[str, Any]:
    """Return the shape of a stack of these mixers with dense networks."""
    return {
        "d_channel_mixing": d_hidden,
        "mixer": mixers,
        "mixer_options": {name: options[name] for name in dict.fromkeys(mixers)},
        "feed_forward": "swiglu",
        "norm_epsilon": epsilon,
    }


class Place(NamedTuple):
    """A parameter here, or a tensor that is not converted: its name, its published tensors' names, and its rule."""

    own: str
    theirs: tuple[str, ...]
    rule: Rule


def usual_names(architecture: Architecture, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Give tensors of other folders their usual names, and drop those that the class has no use for."""
    for beginning, usual in architecture.other_tensors.items():
        found = [name for name in weights if name.startswith(beginning)]
        moved = {name: weights.pop(name) for name in found}
        if usual is not None:
            weights |= {usual + name.removeprefix(beginning): tensor for name, tensor in moved.items()}
    for name, tensor in weights.items():
        if not tensor.is_floating_point():
            raise ValueError(sentence(name, kind_of(tensor), "floating-point numbers, not quantised ones"))
    return architecture.other_layout(weights)


def unpacked_experts(weights: dict[str, Tensor], layers: Mapping[str, tuple[str, ...]]) -> dict[str, Tensor]:
    """Split tensors with all experts of a block; `layers` are those in an expert's rows, by how the name ends."""
    for ending, names in layers.items():
        for name in [name for name, tensor in weights.items() if name.endswith(ending) and tensor.dim() == 3]:
            experts, beginning = weights.pop(name), name.rpartition(".")[0]
            for number, expert in enumerate(experts):
                parts = zip(names, expert.chunk(len(names)))
                weights |= {f"{beginning}.{number}.{layer}.weight": part for layer, part in parts}
    return weights


def matched(model: nn.Module, weights: Mapping[str, Tensor], rules: Sequence[Rule], what: str) -> list[Place]:
    """Find the tensors of every parameter, and refuse weights that are not exactly the model's own."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    places = places_of(parameters, rules)
    given = [place for place in places if all(name in weights for name in place.theirs)]
    filled = {id(parameters[place.own]) for place in given}
    missing = [name for place in places if id(parameters[place.own]) not in filled for name in place.theirs]
    missing = [name for name in missing if name not in weights]
    unknown = sorted(weights.keys() - {name for place in places for name in place.theirs})
    if missing or unknown:
        parts = [f"{kind}: {listed(names)}" for kind, names in (("missing", missing), ("unknown", unknown)) if names]
        raise ValueError(sentence(what, f"not one model's ({'; '.join(parts)})", "the weights of a whole model"))
    for place in given:
        for name, part in zip(place.theirs, place.rule.write(parameters[place.own].detach()), strict=True):
            got, wanted = tuple(weights[name].shape), tuple(part.shape)
            if got != wanted:
                raise ValueError(
                    sentence(f"the shape of {name} in {what}", got, f"{wanted}, as its configuration says")
                )
    return given


@torch.no_grad()
def fill(
    model: nn.Module, weights: dict[str, Tensor], places: Sequence[Place], what: str, factors: Mapping[str, Tensor]
) -> None:
    """Fill every parameter of `model` with what `matched` found, times `factors` (see `Architecture.folded`).

    weights: each entry is removed once it has been copied.
    """
    first: dict[int, str] = {}
    uses = Counter(name for place in places for name in place.theirs)
    for place in places:
        parameter = model.get_parameter(place.own)
        values = place.rule.read(*(_multiplied(weights[name], name, factors, parameter.dtype) for name in place.theirs))
        name = first.setdefault(id(parameter), place.theirs[0])
        if name == place.theirs[0]:
            parameter.copy_(values)
        elif not torch.equal(values, parameter):
            got = f"one in which {name} and {place.theirs[0]} differ"
            raise ValueError(sentence(what, got, "one in which they are equal, as its configuration ties them"))
        uses.subtract(place.theirs)
        for name in (name for name in place.theirs if not uses[name]):
            del weights[name]


def _multiplied(tensor: Tensor, name: str, factors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    """Multiply the rows of a tensor by its factors, all by one or each by its own, and round once, to `dtype`."""
    factor = next((factor for pattern, factor in factors.items() if re.fullmatch(pattern, name)), None)
    return (tensor if factor is None else tensor.double() * factor[:, None]).to(dtype)


def weights_by_their_names(model: nn.Module, rules: Sequence[Rule], *, in_place: bool = False) -> dict[str, Tensor]:
    """Return the weights of `model` in the other code base's names and layout; tied ones under each name.

    They may share the model's memory. in_place: move parameters out of the model, so that none is held twice.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    last = {id(parameter): name for name, parameter in parameters.items()}
    weights: dict[str, Tensor] = {}
    for place in places_of(parameters, rules):
        parameter = parameters[place.own]
        parts = place.rule.write(parameter.detach())
        if in_place and last[id(parameter)] == place.own:
            parameter.data = parameter.data.new_empty(0)
            parts = parts if len(parts) == 1 else tuple(part.clone() for part in parts)  # a view would hold all
        weights |= zip(place.theirs, parts, strict=True)
    return weights


def places_of(names: Iterable[str], rules: Sequence[Rule]) -> list[Place]:
    """Find the first rule that matches each name."""
    patterns = [re.compile(rule.own) for rule in rules]  # more than re remembers
    places = []
    for own in names:
        matches = ((rule, pattern.fullmatch(own)) for rule, pattern in zip(rules, patterns))
        rule, match = next((rule, match) for rule, match in matches if match)
        places.append(Place(own, tuple(match.expand(name) for name in rule.theirs), rule))
    return places


def listed(names: Sequence[str]) -> str:
    """Name the first few."""
    shown = ", ".join(names[:_N_SHOWN])
    return shown if len(names) <= _N_SHOWN else f"{shown} and {len(names) - _N_SHOWN} more"


def split_fused(weights: dict[str, Tensor], fused: Sequence[Fused], what: str) -> dict[str, Tensor]:
    """Replace fused matrices in `weights` by their parts, and skip missing ones."""
    for one in fused:
        if (whole := weights.pop(one.name, None)) is None:
            continue
        n_rows = one.n_groups * sum(one.sizes)
        if whole.dim() != 2 or len(whole) != n_rows:
            expected = f"{n_rows} rows, as its configuration says"
            raise ValueError(sentence(f"the shape of {one.name} in {what}", tuple(whole.shape), expected))
        parts = whole.unflatten(0, (one.n_groups, -1)).split(list(one.sizes), 1)
        weights |= zip(one.names, (part.flatten(0, 1) for part in parts), strict=True)
    return weights


def join_fused(weights: dict[str, Tensor], fused: Sequence[Fused]) -> dict[str, Tensor]:
    """Undo `split_fused`."""
    for one in fused:
        parts = [weights.pop(name).unflatten(0, (one.n_groups, -1)) for name in one.names]
        weights[one.name] = torch.cat(parts, 1).flatten(0, 1)
    return weights
