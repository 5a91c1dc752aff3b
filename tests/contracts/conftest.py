"""Every registered module, small, as the contract suite sees it. A new mixer or model needs no entry here."""

import os
import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import fields
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import recurra
from recurra.mixers.rnn import RNN
from recurra.models.registry import DataSizes, VideoSizes, find_model, list_models
from recurra.ops.cells.gru import GRUCell
from recurra.ops.cells.orthogonal import NCGRUCell

DEVICE = os.environ.get("RECURRA_TEST_DEVICE")
"""Where modules and inputs are made, as in RECURRA_TEST_DEVICE=cuda; without it, on the CPU."""
D_MODEL = 12
VOCABULARY = 11
IN_A_MODEL = frozenset(random.Random(54).sample(sorted(recurra.list_mixers()), 2))
"""Mixers that are also tested in a language model; the others are with `-m slow`."""
COMPILED = {"gateloop", "slstm", "rotary-attention"}
"""An operator of ours, a cell, and a state that grows; the others are compiled with `-m slow`."""
KINDS = {
    *("gateloop", "delta-net", "gru", "mamba2", "rotary-attention", "relative-attention", "rnn-ncgru", "hybrid"),
    *("recurrent-tied", "transformer-xl-adaptive", "crt-ncgru", "crvit", "rmt", "block-recurrent-transformer"),
}
"""One case for each kind of state, for what all modules inherit; the others are with `-m slow`."""

# beside every mixer with its default options
VARIANTS: dict[str, dict[str, dict]] = {
    "delta-net": {"negative": {"negative_eigenvalues": True, "n_heads": 2}},
    "gated-delta-net": {"shared": {"n_heads": 4, "n_qk_heads": 2, "d_qk": 6, "d_v": 8}},
    "gateloop": {
        "fixed": {"transition": "fixed"},
        "heads": {"n_heads": 3, "d_qk": 6, "d_v": 9},
        "stable-exponential": {
            "magnitude_activation": "stable_exponential",
            "output_gate": True,
            "ring": {"r_max": 0.95},
        },
    },
    "h3": {"heads": {"d_state": 4, "head_dim": 3, "discretisation": "zoh"}},
    "hyena": {"third-order": {"window": 4, "order": 3}},
    "linear-attention": {"sums": {"normaliser": False}},
    "linear-rnn": {"dense": {"transition": "dense"}},
    "s4d": {"inv": {"d_state": 10, "init": "inv", "discretisation": "bilinear"}},
}

# where the default options need longer streams or more channels than the suite's to show what they do
OPTIONS: dict[str, dict] = {
    "gated-delta-net": {"n_heads": 2},
    "gateloop-attention": {"window": 5},
    "gated-attention": {"window": 5, "n_heads": 2},
    "gla": {"n_heads": 2},
    "kda": {"n_heads": 2},
    "hgrn2": {"n_heads": 2, "lower_bound": 0.3},
    "mamba2": {"d_state": 5, "n_heads": 2, "n_groups": 2},
    "mamba2-attention": {"d_state": 5, "d_inner": 18, "n_mamba_heads": 2, "n_heads": 2, "window": 5},
    "mamba3": {"d_state": 8, "n_heads": 2},
    "lightning-attention": {"n_heads": 2},
    "mla": {"window": 5, "n_heads": 2, "d_value": 5, "d_latent": 7, "d_query_latent": 4},
    "mlstm": {"n_heads": 2},
    "h3": {"d_state": 6},
    "hyena": {"window": 5},
    "reformer": {"window": 5, "n_heads": 2},
    "relative-attention": {"segment_length": 4, "mem_len": 6, "n_heads": 2},
    "retnet": {"n_heads": 2},
    "rg-lru": {"n_heads": 2, "lru_width": 8},
    "rotary-attention": {"window": 5, "n_heads": 2},
    "zamba2": {"d_state": 5, "d_inner": 18, "n_mamba_heads": 2, "n_heads": 2, "window": 5, "d_hidden": 7},
}


# beside every model in its small shape
MODEL_VARIANTS: dict[str, dict[str, dict]] = {
    "transformer-xl": {
        "adaptive": {"cutoffs": [4, 7], "div_val": 2},
        "pre-norm": {"norm": "pre", "share_biases": False},
    },
    "block-recurrent-transformer": {"lstm": {"gate": "lstm", "recurrent_layer": 1}},
    "crt": {
        "ncgru": {"memory": "ncgru", "position": "rnn-ncgru"},
        "relative": {"position": "relative"},
    },
    "recurrent": {
        "tied": {"tie_embeddings": True},
        "experts": {
            "feed_forward": ["gelu", "mixture-of-experts"],
            "feed_forward_options": {"n_experts": 5, "d_shared": 3},
            "residual_scale": 0.7,
            "logit_scale": 0.4,
        },
        "stream": {  # with norms, and experts in one block
            "norm_place": "stream",
            "feed_forward": ["gelu", "mixture-of-experts"],
            "feed_forward_options": {"n_experts": 3},
        },
        "shared": {  # attention, and embedded tokens from block to block
            "mixer": "zamba2",
            "mixer_options": {"d_state": 5, "n_heads": 2, "window": 5, "adapts_attention": True},
            "residual_scale": 0.3,  # so that rounding errors do not grow from norm to norm
        },
        "values": {"mixer": "rwkv7", "mixer_options": {"n_heads": 2}},  # handed on from block to block
    },
    "crvit": {"pooled": {"cell": "ncgru", "memory": "pooled"}},
}
SMALL = {
    **{"n_layer": 2, "d_model": D_MODEL, "n_heads": 2, "d_channel_mixing": 16, "dropout": 0.0, "mem_len": 6},
    **{"n_memory": 3, "n_states": 3, "patch_size": 2, "drop_path": 0.0},
}


class Case(NamedTuple):
    """A module under the contract and how to make its inputs."""

    name: str
    build: Callable[[], nn.Module]
    draw: Callable[[int, int], Tensor]  # (batch, length) -> input
    takes_no_steps: bool = True
    traced_steps: int = 3  # the compiler unrolls them; two calls fill a window or segment and begin the next
    pieces: tuple[int, ...] = (1, 1, 2, 3, 5, 7, 16, 17, 31)  # of the cuts: beyond any window, segment and vector


# These models compute a segment of 4 steps after the other and remember 6: 9 steps cross all that there is to cross.
_OF_SEGMENTS: dict[str, Any] = {"pieces": (1, 1, 2, 3, 5, 9)}
_OF_CLIPS: dict[str, Any] = {"pieces": (1, 1, 2, 3)}  # their steps are whole segments


def _channels(batch: int, length: int) -> Tensor:
    return torch.randn(batch, length, D_MODEL, dtype=torch.float64)


def _tokens(batch: int, length: int) -> Tensor:
    return torch.randint(VOCABULARY, (batch, length))


def build_model(name: str, **options: Any) -> nn.Module:
    """Build a registered model in its small shape."""
    entry = find_model(name)
    known = {field.name for field in fields(entry.config)}
    small = {key: value for key, value in SMALL.items() if key in known}
    sizes = DataSizes(VOCABULARY, VOCABULARY, 4) if entry.reads is DataSizes else VideoSizes(5, 2, 4)
    return entry.config(**(small | options)).build(sizes)


class _BySegment(nn.Module):
    """A model of clips whose steps are segments, (B, S, n_frames, C, H, W), as the suite counts and cuts steps."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x, state=None):
        return self.model(x.flatten(1, 2), state)


def _clips(batch: int, length: int) -> Tensor:
    return torch.randn(batch, length, 2, 3, 4, 4, dtype=torch.float64)


def _video(name: str, **options: Any) -> nn.Module:
    """A model with weights moved away from its start, where no time attention is heard and no gradient reaches it."""
    model = build_model(name, n_layer=1, **options)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return _BySegment(model)


def _mixer_cases() -> list[Case]:
    cases = []
    for name in recurra.list_mixers():
        variants = {"": OPTIONS.get(name, {}), **VARIANTS.get(name, {})}
        for variant, options in variants.items():
            build = lambda name=name, options=options: recurra.create_mixer(name, D_MODEL, **options)  # noqa: E731
            cases.append(Case("-".join(filter(None, [name, variant])), build, _channels))
        # one block; stacks of several are the other models', and of different mixers, the hybrid's
        options = {"mixer": name, "mixer_options": OPTIONS.get(name, {}), "n_layer": 1}
        build = lambda options=options: build_model("recurrent", **options)  # noqa: E731
        cases.append(Case(f"language-model-{name}", build, _tokens))
    cases.append(Case("rnn-gru", lambda: RNN(GRUCell(D_MODEL, 7)), _channels))
    return [*cases, Case("rnn-ncgru", lambda: RNN(NCGRUCell(D_MODEL, 7)), _channels)]


def _model_cases() -> list[Case]:
    cases = []
    for entry in list_models():
        variants = MODEL_VARIANTS.get(entry.name, {})
        if entry.name != "recurrent":  # there already, with every mixer
            variants = {"": {}, **variants}
        for variant, options in variants.items():
            name = "-".join(filter(None, [entry.name, variant]))
            if entry.is_language_model:
                build = lambda name=entry.name, options=options: build_model(name, **options)  # noqa: E731
                cases.append(Case(name, build, _tokens, **_OF_SEGMENTS))
            else:
                build = lambda name=entry.name, options=options: _video(name, **options)  # noqa: E731
                cases.append(Case(name, build, _clips, takes_no_steps=False, traced_steps=2, **_OF_CLIPS))
    options = {"relative-attention": OPTIONS["relative-attention"], "gateloop": {"n_heads": 3}}
    hybrid = {"mixer": list(options)[::-1], "mixer_options": options, "norm_place": ["before", "after"]}
    return [*cases, Case("hybrid", lambda: build_model("recurrent", **hybrid), _tokens)]


def all_cases() -> list[Case]:
    return _mixer_cases() + [
        case for case in _model_cases() if case.name not in ("timesformer", "pi-vit")
    ]  # they carry nothing


def is_sampled(case: Case) -> bool:
    """Whether a case is not one of the language models that are left for `-m slow`."""
    mixer = case.name.removeprefix("language-model-")
    return mixer == case.name or mixer in IN_A_MODEL


def _marked(is_quick: Callable[[Case], bool]) -> list[Any]:
    return [pytest.param(case, id=case.name, marks=() if is_quick(case) else pytest.mark.slow) for case in all_cases()]


of_each_kind = pytest.mark.parametrize("case", _marked(lambda case: case.name in KINDS))


@pytest.fixture(autouse=True)
def _on_the_device() -> Iterator[None]:
    with nullcontext() if DEVICE is None else torch.device(DEVICE):
        yield


@pytest.fixture(params=_marked(lambda case: case.name in COMPILED))
def compiled_case(request) -> Case:
    return request.param


@pytest.fixture(params=_marked(is_sampled))
def case(request) -> Case:
    return request.param


@pytest.fixture(params=[case for case in _mixer_cases() if case.draw is _channels], ids=lambda case: case.name)
def mixer(request) -> nn.Module:
    """A registered mixer in float64."""
    return request.param.build().double()


@pytest.fixture(params=[case for case in all_cases() if case.draw is _tokens], ids=lambda case: case.name)
def language_model(request) -> nn.Module:
    """Every registered language model, with every mixer."""
    return request.param.build()


@pytest.fixture
def module(case) -> nn.Module:
    """The case's module in float64, so that tolerances can be tight."""
    return case.build().double()
