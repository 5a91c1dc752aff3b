"""A language model as a folder that transformers loads, and back."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from recurra.convert.portable import PortableModel
from recurra.files.stamped_json import read_stamped, write_stamped
from recurra.files.typed import require_fields
from recurra.huggingface.configuration import RecurraConfig
from recurra.huggingface.modeling import RecurraForCausalLM, causal_lm
from recurra.huggingface.tokenizer import fast_tokenizer, line_start, read_tokenizer

ORIGIN = "recurra.json"
"""The file for what transformers does not ask for: the experiment, and the step of the weights."""


def save_folder(portable: PortableModel, folder: Path) -> None:
    """Write a model as transformers loads it.

    It writes config.json, model.safetensors and generation_config.json, in which a text begins as a line does; for the
    tokenizer, if there is one, tokenizer.json and tokenizer_config.json; and recurra.json, from which `recurra convert`
    rebuilds the run. The weights keep their dtype.

    Raises:
        OSError: it cannot be written.
        TypeError, ValueError: the model is not a language model, or the tokenizer cannot be converted.
    """
    model = causal_lm(portable.model)
    tokenizer = None if portable.tokenizer is None else fast_tokenizer(portable.tokenizer)
    if portable.tokenizer is not None:
        model.generation_config.bos_token_id = line_start(portable.tokenizer)
    with _quietly():
        model.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    origin = {"format": 1, "step": portable.step, "experiment": portable.experiment}
    write_stamped(folder / ORIGIN, origin)


def load_folder(folder: Path) -> PortableModel:
    """Read a model of this package in float32, and its tokenizer if there is one, from a folder for transformers.

    If the folder comes from `save_pretrained`, the experiment and the step are unknown.

    Raises:
        OSError: it cannot be read.
        ValueError: it is of another model, or incomplete; the tokenizer has other tokens than the model.
    """
    config = AutoConfig.from_pretrained(folder)
    if not isinstance(config, RecurraConfig):
        raise ValueError(f"{folder} holds a model of type {config.model_type!r}; expected a model of this package")
    with _quietly():
        model: RecurraForCausalLM = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = read_tokenizer(folder)
    if tokenizer is not None and len(tokenizer) != config.vocab_size:
        raise ValueError(
            f"{folder} has a tokenizer of {len(tokenizer)} tokens and a model of {config.vocab_size}; remove "
            "tokens that were added to the tokenizer, for padding for example"
        )
    origin: dict[str, Any] = {"step": None, "experiment": None}
    if (folder / ORIGIN).is_file():
        origin |= read_stamped(folder / ORIGIN)
        require_fields(origin, {"step": int | None, "experiment": dict[str, Any] | None}, str(folder / ORIGIN))
    return PortableModel(model.model, tokenizer, origin["experiment"], origin["step"])


@contextmanager
def _quietly() -> Iterator[None]:
    """Without transformers' progress bars."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
