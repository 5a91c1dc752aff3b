"""Weights of other code bases, by their own names, for the models here; language models in a single file."""

from recurra.convert.files import read_weights
from recurra.convert.portable import (
    PortableModel,
    largest_difference,
    require_equal,
    tied_parameters,
    tokenizer_from_json,
    tokenizer_to_json,
)
from recurra.convert.published import from_huggingface, to_huggingface
from recurra.convert.single_file import load_single_file, save_single_file
from recurra.convert.timesformer import timesformer_from_huggingface, timesformer_from_original
from recurra.convert.transformer_xl import transformer_xl_from_original

__all__ = [
    "PortableModel",
    "from_huggingface",
    "largest_difference",
    "load_single_file",
    "read_weights",
    "require_equal",
    "save_single_file",
    "tied_parameters",
    "timesformer_from_huggingface",
    "timesformer_from_original",
    "to_huggingface",
    "tokenizer_from_json",
    "tokenizer_to_json",
    "transformer_xl_from_original",
]
