"""Published Transformer-XL: weights of the original PyTorch code and of Hugging Face's transfo-xl-wt103.

Both use the same names; Hugging Face puts `transformer.` in front of all but the softmax's (`crit.`). They differ in
two points. The original PyTorch code (github.com/kimiyoung/transformer-xl, proj_adaptive_softmax.py) reads the columns
of the clusters in the adaptive softmax from the last to the first. Hugging Face's weights come from the TensorFlow
code, where cluster i has column i, and its port reads them so (transformers 4.35, modeling_transfo_xl_utilities.py).
And that port starts a stream with a memory of mem_len zeros, the original, as here, with none.
"""

import itertools
import re
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from recurra.checks import require_literal, sentence
from recurra.convert.published._rules import Rule, fill, matched
from recurra.models.transformer_xl import TransformerXL, TransformerXLConfig

_ASKED_FOR = {
    "segment_length": "the steps of a segment (tgt_len)",
    "mem_len": "the steps of the memory",
    "norm": "'post' or 'pre' (pre_lnorm False or True)",
}
_ASKED_OF_PORT = {"same_length": "True or False", "clamp_len": "the largest distance, or None for no limit"}
"""Hugging Face's defaults (True and 1000) differ from the original's (False and no limit)."""
_LAYER = r"layers.\g<layer>."
_BLOCK = r"blocks\.(?P<layer>\d+)\."
_NAMES = {
    r"embedding\.tables\.(\d+)": r"word_emb.emb_layers.\1.weight",
    r"embedding\.projections\.(\d+)": r"word_emb.emb_projs.\1",
    rf"{_BLOCK}attention\.position_keys\.weight": f"{_LAYER}dec_attn.r_net.weight",
    rf"{_BLOCK}attention\.output_projection\.weight": f"{_LAYER}dec_attn.o_net.weight",
    rf"{_BLOCK}norm_attention\.(\w+)": rf"{_LAYER}dec_attn.layer_norm.\2",
    rf"{_BLOCK}feed_forward\.(\d)\.(\w+)": rf"{_LAYER}pos_ff.CoreNet.\2.\3",
    rf"{_BLOCK}norm_feed_forward\.(\w+)": rf"{_LAYER}pos_ff.layer_norm.\2",
    r"head\.tables\.(\d+)": r"crit.out_layers.\1.weight",
    r"head\.biases\.(\d+)": r"crit.out_layers.\1.bias",
    r"head\.projections\.(\d+)": r"crit.out_projs.\1",
}
"""The names here to the original's."""
_BIASES = {"content_bias": "r_w_bias", "position_bias": "r_r_bias"}
_FREQUENCIES = "pos_emb.inv_freq"
"""Of the sinusoids: those of all published weights are the ones used here."""


def transformer_xl_from_original(
    state_dict: Mapping[str, Tensor], *, cluster_order: str | None = None, **config: Any
) -> TransformerXL:
    """Make a `TransformerXL` from published weights: it gives the original's logits, memories and likelihoods.

    Args:
        state_dict: the weights by the original's names (`word_emb.emb_layers.0.weight`, ...), with or without
            `transformer.` in front. Of tied tensors one is enough.
        cluster_order: how the clusters' columns stand in the adaptive softmax: "reversed" as the original PyTorch code
            reads them, or "natural" as Hugging Face's does. None decides by the names: natural where they begin with
            `transformer.` except for `crit.`, as Hugging Face's do.
        config: options of `TransformerXLConfig`. What the weights do not tell is required: `segment_length` (theirs:
            `tgt_len`), `mem_len` and `norm` (`pre_lnorm`), `cutoffs` if there are clusters and div_val is 1, and, with
            Hugging Face's weights, `same_length` and `clamp_len` (None for their -1). Relative attention after Dai et
            al. (`attn_type` 0) without an extended context (`ext_len` 0) is what they are taken for.

    Returns:
        The model in evaluation mode, in the type of the weights.
    """
    if cluster_order is None:
        cluster_order = "natural" if _is_port(state_dict) else "reversed"
    require_literal(Literal["reversed", "natural"], cluster_order=cluster_order)
    weights = {name.removeprefix("transformer."): tensor for name, tensor in state_dict.items()}
    if len(weights) < len(state_dict):
        raise ValueError(
            "state_dict has the same names with and without transformer. in front; give one set of weights"
        )
    for name, expected in (_ASKED_FOR | _ASKED_OF_PORT if _is_port(state_dict) else _ASKED_FOR).items():
        if name not in config:
            raise ValueError(sentence(name, "missing", expected, "the weights do not tell"))
    sizes = _sizes(weights, config)
    for name in sizes.keys() & config.keys():
        if config[name] is not None and config[name] != sizes[name]:
            raise ValueError(f"{name} is given as {config[name]}; in the weights it is {sizes[name]}")
    model = TransformerXL(TransformerXLConfig(**{**config, **sizes}))
    model.to(weights["word_emb.emb_layers.0.weight"].dtype)
    rules, what = _rules(model.config, reverse_clusters=cluster_order == "reversed"), "state_dict"
    weights = _without_copies(weights)
    fill(model, weights, matched(model, weights, rules, what), what, {})
    return model.eval()


def _is_port(state_dict: Mapping[str, Tensor]) -> bool:
    """Whether the names are Hugging Face's."""
    prefixed = [name.removeprefix("transformer.") for name in state_dict if name.startswith("transformer.")]
    return bool(prefixed) and not any(name.startswith("crit.") for name in prefixed)


def _sizes(weights: Mapping[str, Tensor], options: Mapping[str, Any]) -> dict[str, Any]:
    """What the weights tell of the configuration."""

    def shape(name: str) -> torch.Size:
        if name not in weights:
            raise ValueError(f"state_dict is no Transformer-XL, or not a whole one; missing: {name}")
        return weights[name].shape

    if "layers.0.dec_attn.kv_net.weight" in weights:
        raise ValueError("state_dict has layers.0.dec_attn.kv_net.weight; absolute attention is not supported")
    n_tables = _count(weights, r"(?:word_emb\.emb_layers|crit\.out_layers)\.(\d+)\.")
    tables = [shape(f"word_emb.emb_layers.{table}.weight") for table in range(max(1, n_tables))]
    share_biases = "r_w_bias" in weights
    n_heads, d_head = shape("r_w_bias" if share_biases else "layers.0.dec_attn.r_w_bias")
    sizes: dict[str, Any] = {
        "vocab_size": sum(n_tokens for n_tokens, _ in tables),
        "d_embedding": tables[0][1],
        "d_model": shape("layers.0.dec_attn.layer_norm.weight")[0],
        "d_channel_mixing": shape("layers.0.pos_ff.CoreNet.0.bias")[0],
        "n_heads": n_heads,
        "d_head": d_head,
        "share_biases": share_biases,
    }
    if "n_layer" not in options:
        sizes["n_layer"] = _count(weights, r"layers\.(\d+)\.")
    if len(tables) > 1:
        sizes["div_val"] = tables[0][1] // tables[1][1]
        sizes["cutoffs"] = list(itertools.accumulate(n_tokens for n_tokens, _ in tables[:-1]))
    elif "crit.cluster_weight" in weights and "cutoffs" not in options:
        n_clusters = len(weights["crit.cluster_weight"])
        expected = f"the {n_clusters} words where the clusters of the adaptive softmax end, all but the last"
        raise ValueError(sentence("cutoffs", "missing", expected, "with a div_val of 1 the weights do not tell"))
    return sizes


def _count(weights: Mapping[str, Tensor], pattern: str) -> int:
    """One more than the largest number in the names that begin with a pattern; 0 if there are none."""
    matches = (re.match(pattern, name) for name in weights)
    return 1 + max((int(match[1]) for match in matches if match), default=-1)


def _rules(config: TransformerXLConfig, *, reverse_clusters: bool) -> list[Rule]:
    """Make the rules for all weights. These models are only read: of what is written there, the shape matters alone."""
    place = "" if config.share_biases else f"{_LAYER}dec_attn."
    qkv = (f"{_LAYER}dec_attn.qkv_net.weight",)
    turned = (lambda x: x.flip(0), lambda x: (x.flip(0),)) if reverse_clusters else ()
    return [
        *(Rule(own, (name,)) for own, name in _NAMES.items()),
        *(Rule(f"{_BLOCK}attention\\.{own}", (place + name,)) for own, name in _BIASES.items()),
        Rule(rf"{_BLOCK}attention\.queries\.weight", qkv, lambda x: x[: len(x) // 3], lambda q: (q.repeat(3, 1),)),
        Rule(
            rf"{_BLOCK}attention\.keys_values\.weight",
            qkv,
            lambda x: x[len(x) // 3 :],
            lambda kv: (kv.repeat(2, 1)[: 3 * len(kv) // 2],),
        ),
        Rule(r"head\.(cluster_weight|cluster_bias)", (r"crit.\1",), *turned),
    ]


def _without_copies(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Drop the sinusoids, and shared biases in the layers, which must equal the shared ones."""
    weights = {name: tensor for name, tensor in weights.items() if name != _FREQUENCIES}
    for shared in _BIASES.values() & weights.keys():
        for copy in [name for name in weights if re.fullmatch(rf"layers\.\d+\.dec_attn\.{shared}", name)]:
            if not torch.equal(weights.pop(copy), weights[shared]):
                raise ValueError(
                    sentence("state_dict", f"one in which {shared} and {copy} differ", "one in which they are tied")
                )
    return weights
