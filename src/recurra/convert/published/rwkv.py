"""RWKV-4 as transformers' RwkvForCausalLM has it (RWKV/rwkv-4-*-pile)."""

from typing import Any

import torch

from recurra.convert.published._rules import Architecture, Rule
from recurra.convert.published._settings import MOST_LAYERS, Settings
from recurra.models.language_model import LanguageModelConfig

_TIME, _CHANNELS = "rwkv4", "rwkv4-channel-mixing"
_HALVES = {
    "attention": {
        "mix_key": "time_mix_key",
        "mix_value": "time_mix_value",
        "mix_receptance": "time_mix_receptance",
        "log_decay": "time_decay",
        "bonus": "time_first",
        "key.weight": "key.weight",
        "value.weight": "value.weight",
        "receptance.weight": "receptance.weight",
        "output_projection.weight": "output.weight",
    },
    "feed_forward": {
        "mix_key": "time_mix_key",
        "mix_receptance": "time_mix_receptance",
        "key.weight": "key.weight",
        "receptance.weight": "receptance.weight",
        "value.weight": "value.weight",
    },
}
"""The weights of both halves of a block, names here to names there."""


def _config(settings: Settings) -> LanguageModelConfig:
    d_model, n_blocks = settings.size("hidden_size", 4096), settings.size("num_hidden_layers", 32, most=MOST_LAYERS)
    settings.only("layer_norm_epsilon", 1e-5)  # their last norm has this epsilon whatever the entry says
    # In evaluation transformers halves the residual stream every few blocks, to stay within float16, and the weights of
    # what is added to it. But for the norms' epsilon nothing changes, and in training it does not do so.
    settings.ignore("rescale_every", "context_length", "max_position_embeddings")
    return LanguageModelConfig(
        vocab_size=settings.size("vocab_size", 50277),
        n_layer=2 * n_blocks,
        d_model=d_model,
        d_channel_mixing=0,
        mixer=[_TIME, _CHANNELS] * n_blocks,
        mixer_options={
            _TIME: {"d_wkv": settings.optional_size("attention_hidden_size") or d_model},
            _CHANNELS: {"d_hidden": settings.optional_size("intermediate_size") or 4 * d_model},
        },
        biases=False,
        embedding_norm=True,
        tie_embeddings=settings.flag("tie_word_embeddings", False),
    )


def _rules(config: LanguageModelConfig) -> list[Rule]:
    rules = [
        Rule(r"embedding\.weight", ("rwkv.embeddings.weight",)),
        Rule(r"embedding_norm\.(\w+)", (r"rwkv.blocks.0.pre_ln.\1",)),
        Rule(r"norm\.(\w+)", (r"rwkv.ln_out.\1",)),
        Rule(r"head\.weight", ("head.weight",)),
    ]
    for number in range(config.n_layer):
        own, theirs = rf"blocks\.{number}", f"rwkv.blocks.{number // 2}"
        half = list(_HALVES)[number % 2]
        rules.append(Rule(rf"{own}\.norm_mixing\.(\w+)", (rf"{theirs}.ln{number % 2 + 1}.\1",)))
        for name, other in _HALVES[half].items():
            rules.append(_rule(rf"{own}\.mixer\.{name}", f"{theirs}.{half}.{other}"))
    return rules


def _rule(own: str, theirs: str) -> Rule:
    if "time_mix" not in theirs:
        return Rule(own, (theirs,))
    return Rule(own, (theirs,), torch.flatten, lambda share: (share.view(1, 1, -1),))  # theirs: one batch, one step


def _settings(config: LanguageModelConfig) -> dict[str, Any]:
    options = dict(config.mixers)
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "num_hidden_layers": max(config.n_layer // 2, 1),
        "attention_hidden_size": options[_TIME].get("d_wkv") or config.d_model,
        "intermediate_size": options.get(_CHANNELS, {}).get("d_hidden") or 4 * config.d_model,
        "rescale_every": 0,
        "tie_word_embeddings": config.tie_embeddings,
    }


RWKV = Architecture("rwkv", "RwkvForCausalLM", _TIME, _config, _rules, _settings, head="head.weight")
