"""Published language models of this field in transformers' own folders: one file an architecture."""

from recurra.convert.published import jamba, mamba, qwen3_next, recurrent_gemma, rwkv, xlstm
from recurra.convert.published.folder import (
    ARCHITECTURES,
    from_huggingface,
    model_type_of,
    to_huggingface,
    without_unused_tokens,
)

__all__ = [
    "ARCHITECTURES",
    "from_huggingface",
    "jamba",
    "mamba",
    "model_type_of",
    "qwen3_next",
    "recurrent_gemma",
    "rwkv",
    "to_huggingface",
    "without_unused_tokens",
    "xlstm",
]
