"""Weights of other code bases, by their own names, into the models of this one."""

from recurra.convert.transformer_xl import transformer_xl_from_original

__all__ = ["transformer_xl_from_original"]
