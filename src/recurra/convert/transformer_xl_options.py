"""The options of a published Transformer-XL, whole: each one is translated, neutral, of no concern or refused by name.

They come from the original PyTorch code (the arguments of train.py and of MemTransformerLM) or from Hugging Face's
TransfoXLConfig (transformers 4.35).
"""

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from recurra.checks import require, sentence
from recurra.convert.options import NO_CROSS_ATTENTION, Neutral, renamed, take_neutral
from recurra.convert.published.settings import OF_NO_CONCERN
from recurra.models.transformer_xl import TransformerXLConfig

_RENAMED = {
    "n_token": "vocab_size",
    "n_head": "n_heads",
    "num_attention_heads": "n_heads",
    "num_hidden_layers": "n_layer",
    "hidden_size": "d_model",
    "d_inner": "d_channel_mixing",
    "d_embed": "d_embedding",
    "tgt_len": "segment_length",
    "dropatt": "attention_dropout",
    "tie_weight": "tie_embeddings",
    "tie_word_embeddings": "tie_embeddings",
    "tied": "tie_embeddings",
    "not_tied": "tie_embeddings",
    "tie_projs": "tie_projections",
    "pre_lnorm": "norm",
    "untie_r": "share_biases",
}
_FLAGS = ("tie_weight", "tie_word_embeddings", "tied", "not_tied", "pre_lnorm", "untie_r", "same_length", "adaptive")
_TRANSLATED: dict[str, Callable[[Any], Any]] = {
    "pre_lnorm": lambda value: "pre" if value else "post",
    "untie_r": lambda value: not value,
    "not_tied": lambda value: not value,
    "clamp_len": lambda value: value if value is not None and value > 0 else None,
    "d_embed": lambda value: None if value == -1 else value,
    "dropout": float,
    "dropatt": float,
    "cutoffs": list,
    "tie_projs": list,
}

_OTHER_ATTENTION = {
    1: "relative attention after Shaw et al. is not supported",
    2: "absolute attention is not supported",
    3: "absolute attention with learnt positions is not supported",
}
_NEUTRAL = {
    **NO_CROSS_ATTENTION,
    "sample_softmax": Neutral(
        lambda value: value is None or value <= 0, "at most 0", "a sampled softmax is not supported"
    ),
    "ext_len": Neutral(lambda value: value == 0, "0", "an extended context is not supported"),
    "layer_norm_epsilon": Neutral(lambda value: value == 1e-5, "1e-05", "other norms are not supported"),
}
"""Options that we lack."""

_OF_TRAINING = {
    "adapt_inp",
    "batch_chunk",
    "batch_size",
    "clip",
    "clip_nonemb",
    "cuda",
    "data",
    "dataset",
    "debug",
    "decay_rate",
    "dist_backend",
    "dist_url",
    "distributed",
    "dynamic_loss_scale",
    "emb_init",
    "emb_init_range",
    "eta_min",
    "eval_interval",
    "eval_tgt_len",
    "finetune_v2",
    "finetune_v3",
    "fp16",
    "gpu0_bsz",
    "init",
    "init_range",
    "init_std",
    "local_rank",
    "log_interval",
    "lr",
    "lr_min",
    "max_eval_steps",
    "max_step",
    "mom",
    "multi_gpu",
    "n_all_param",
    "n_nonemb_param",
    "optim",
    "patience",
    "proj_init_std",
    "restart",
    "restart_dir",
    "scheduler",
    "seed",
    "static_loss_scale",
    "varlen",
    "warmup_step",
    "work_dir",
}
"""How a model starts, trains or is evaluated; eval_tgt_len is for `TransformerXL.with_lengths`."""

_ASKED_FOR = {
    "segment_length": "the steps of a segment (tgt_len)",
    "mem_len": "the steps of the memory",
    "norm": "'post' or 'pre' (pre_lnorm False or True)",
}
_ASKED_OF_PORT = {
    "same_length": "True or False",
    "clamp_len": "the largest distance, or -1 for no limit",
}
"""Hugging Face's defaults (True and 1000) differ from the original's (False and no limit)."""


def own_options(given: Mapping[str, Any], *, of_port: bool) -> dict[str, Any]:
    """Translate options into those of `TransformerXLConfig`.

    Args:
        given: by the names of `TransformerXLConfig`, the original's or Hugging Face's.
        of_port: whether the weights are Hugging Face's, whose defaults differ.

    Raises:
        ValueError: an option asks for what is not supported, contradicts another, or is missing where the weights do
            not tell.
        TypeError: an option does not exist, or is not the flag that it should be.
    """
    left = {name: value for name, value in given.items() if name not in OF_NO_CONCERN | _OF_TRAINING}
    for name in left.keys() & set(_FLAGS):
        if not isinstance(left[name], bool):
            raise TypeError(sentence(name, repr(left[name]), "True or False"))
    _drop_neutral(left)
    _drop_summaries(left)
    own = renamed(left, (field.name for field in fields(TransformerXLConfig)), _RENAMED, _TRANSLATED)
    asked = {**_ASKED_FOR, **_ASKED_OF_PORT} if of_port else _ASKED_FOR
    for name, expected in asked.items():
        if own.get(name) is None and not (name == "clamp_len" and name in own):
            raise ValueError(sentence(name, "missing", expected, "the weights do not tell"))
    return own


def _drop_neutral(left: dict[str, Any]) -> None:
    """Take out what we lack, and refuse what is not neutral."""
    kind = left.pop("attn_type", 0)
    require(kind == 0, "attn_type", kind, "0", _OTHER_ATTENTION.get(kind, "there is no such attention"))
    take_neutral(left, _NEUTRAL)


def _drop_summaries(left: dict[str, Any]) -> None:
    """Take out what says the same as other options: adaptive, and Hugging Face's summary of tie_projs."""
    n_cutoffs = len(left.get("cutoffs") or [])
    if left.pop("adaptive", True) is False:
        require(n_cutoffs == 0, "adaptive", False, "True with cutoffs", "a plain softmax has none")
    shared = left.pop("proj_share_all_but_first", None)
    if shared is None or (shared and "cutoffs" not in left):  # the default is to share all but the first
        return
    if left.get("cutoffs") is None:
        raise ValueError(
            sentence("cutoffs", "missing", "the ends of the clusters, with proj_share_all_but_first False")
        )
    projections = [False] + [bool(shared)] * n_cutoffs
    for name in ("tie_projs", "tie_projections"):
        if left.get(name) is not None and list(left[name]) != projections:
            raise ValueError(sentence("proj_share_all_but_first", repr(shared), f"what says the same as {name}"))
    left.setdefault("tie_projections", projections)
