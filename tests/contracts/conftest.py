"""Every registered module, small, as the contract suite sees it."""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

import recurra
from recurra.cells import GRUCell, NCGRUCell
from recurra.mixers import RNN
from recurra.models import (
    CompactRecurrentTransformer,
    CompactRecurrentTransformerConfig,
    CompactRecurrentViT,
    CompactRecurrentViTConfig,
    LanguageModel,
    LanguageModelConfig,
    TransformerXL,
    TransformerXLConfig,
)

D_MODEL = 12
VOCABULARY = 11

# beside every mixer with its default options; a new mixer needs no entry
VARIANTS: dict[str, dict[str, dict]] = {
    "gateloop": {
        "fixed": {"transition": "fixed"},
        "heads": {"n_heads": 3, "d_qk": 6, "d_v": 9},
        "stable-exponential": {
            "magnitude_activation": "stable_exponential",
            "output_gate": True,
            "ring": {"r_max": 0.95},
        },
    },
    "linear-attention": {"sums": {"normaliser": False}},
    "linear-rnn": {"dense": {"transition": "dense"}},
    "s4d": {"inv": {"d_state": 10, "init": "inv", "discretisation": "bilinear"}},
}

# where the default options need longer streams or more channels than the suite's to show what they do
OPTIONS: dict[str, dict] = {
    "gateloop-attention": {"window": 5},
    "relative-attention": {"segment_length": 4, "mem_len": 6, "n_heads": 2},
    "retnet": {"n_heads": 2},
    "rotary-attention": {"window": 5, "n_heads": 2},
}


class Case(NamedTuple):
    """A module under the contract and how to make its inputs."""

    name: str
    build: Callable[[], nn.Module]
    draw: Callable[[int, int], Tensor]  # (batch, length) -> input
    takes_no_steps: bool = True
    traced_steps: int = 9  # the compiler unrolls them


def _channels(batch: int, length: int) -> Tensor:
    return torch.randn(batch, length, D_MODEL, dtype=torch.float64)


def _tokens(batch: int, length: int) -> Tensor:
    return torch.randint(VOCABULARY, (batch, length))


def _language_model(mixer: str | list[str], **options) -> nn.Module:
    return LanguageModel(
        LanguageModelConfig(
            vocab_size=VOCABULARY, n_layer=2, d_model=D_MODEL, d_channel_mixing=16, mixer=mixer, **options
        )
    )


def _transformer_xl(**options) -> nn.Module:
    shape = {"n_layer": 2, "d_model": D_MODEL, "n_heads": 2, "d_channel_mixing": 16, "dropout": 0.0}
    return TransformerXL(
        TransformerXLConfig(vocab_size=VOCABULARY, segment_length=4, **{"mem_len": 6, **shape, **options})
    )


def _crt(memory: str, position: str) -> nn.Module:
    shape = {"n_layer": 2, "d_model": D_MODEL, "n_heads": 2, "d_channel_mixing": 16, "dropout": 0.0}
    config = CompactRecurrentTransformerConfig(
        vocab_size=VOCABULARY, segment_length=4, memory=memory, position=position, **shape
    )
    return CompactRecurrentTransformer(config)


class _BySegment(nn.Module):
    """A model of clips whose steps are segments, (B, S, n_frames, C, H, W), as the suite counts and cuts steps."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x, state=None):
        return self.model(x.flatten(1, 2), state)


def _clips(batch: int, length: int) -> Tensor:
    return torch.randn(batch, length, 2, 3, 4, 4, dtype=torch.float64)


def _video(cell: str, memory: str) -> nn.Module:
    """A CR-ViT with weights moved away from its start, where no time attention is heard and no gradient reaches it."""
    config = CompactRecurrentViTConfig(
        n_classes=5, n_frames=2, image_size=4, patch_size=2, n_layer=1, d_model=D_MODEL, n_heads=2,
        d_channel_mixing=16, drop_path=0.0, cell=cell, memory=memory,
    )  # fmt: skip
    model = CompactRecurrentViT(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return _BySegment(model)


VIDEO_MODELS: dict[str, Callable[[], nn.Module]] = {
    "cr-vit-gru": lambda: _video("gru", "per_patch"),
    "cr-vit-ncgru-pooled": lambda: _video("ncgru", "pooled"),
}

SEGMENT_MODELS: dict[str, Callable[[], nn.Module]] = {
    "transformer-xl": _transformer_xl,
    "transformer-xl-adaptive": lambda: _transformer_xl(cutoffs=[4, 7], div_val=2),
    "transformer-xl-pre-norm": lambda: _transformer_xl(norm="pre", share_biases=False),
    "crt-gru": lambda: _crt("gru", "rnn-gru"),
    "crt-ncgru": lambda: _crt("ncgru", "rnn-ncgru"),
    "crt-gru-relative": lambda: _crt("gru", "relative"),
}


def _cases() -> list[Case]:
    cases = []
    for name in recurra.list_mixers():
        cases.append(
            Case(name, lambda name=name: recurra.create_mixer(name, D_MODEL, **OPTIONS.get(name, {})), _channels)
        )
        for variant, options in VARIANTS.get(name, {}).items():
            build = lambda name=name, options=options: recurra.create_mixer(name, D_MODEL, **options)  # noqa: E731
            cases.append(Case(f"{name}-{variant}", build, _channels))
        cases.append(
            Case(
                f"language-model-{name}",
                lambda name=name: _language_model(name, mixer_options=OPTIONS.get(name, {})),
                _tokens,
            )
        )
    cases.append(Case("rnn-gru", lambda: RNN(GRUCell(D_MODEL, 7)), _channels))
    cases.append(Case("rnn-ncgru", lambda: RNN(NCGRUCell(D_MODEL, 7)), _channels))
    for name, build in SEGMENT_MODELS.items():
        cases.append(Case(name, build, _tokens))
    for name, build in VIDEO_MODELS.items():
        cases.append(Case(name, build, _clips, takes_no_steps=False, traced_steps=3))
    hybrid = ["gateloop", "relative-attention"]
    options = {"relative-attention": OPTIONS["relative-attention"], "gateloop": {"n_heads": 3}}
    cases.append(Case("hybrid", lambda: _language_model(hybrid, mixer_options=options), _tokens))
    tied = lambda: _language_model(recurra.list_mixers()[0], tie_embeddings=True)  # noqa: E731
    return [*cases, Case("language-model-tied", tied, _tokens)]


@pytest.fixture(params=_cases(), ids=lambda case: case.name)
def case(request) -> Case:
    return request.param


@pytest.fixture
def module(case) -> nn.Module:
    """The case's module in float64, so that tolerances can be tight."""
    return case.build().double()
