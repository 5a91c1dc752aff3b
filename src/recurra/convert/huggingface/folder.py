"""A language model as a folder that transformers loads, and back."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import AutoConfig
from transformers.utils import logging

from recurra._files.digests import write_manifest
from recurra.checks import sentence
from recurra.convert.huggingface.configuration import MODEL_FILES, TOKENIZER_FILES, RecurraConfig, require_sound
from recurra.convert.huggingface.modeling import MODELS, causal_lm
from recurra.convert.huggingface.tokenizer import fast_tokenizer, read_tokenizer, text_start
from recurra.convert.portable import PortableModel


def save_folder(portable: PortableModel, folder: Path) -> None:
    """Write a model as transformers loads it.

    It writes config.json, model.safetensors and generation_config.json, in which a text begins as a line does; for the
    tokenizer, if there is one, tokenizer.json and tokenizer_config.json; and manifest.json, from which `recurra
    convert` rebuilds the run, and which has the digests of all these files. The weights keep their dtype.
    """
    model = causal_lm(portable.model)
    tokenizer = None if portable.tokenizer is None else fast_tokenizer(portable.tokenizer)
    if portable.tokenizer is not None:
        model.generation_config.bos_token_id = text_start(portable.tokenizer)
    with _quietly():
        model.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    about = {"experiment": portable.experiment, "step": portable.step}
    write_manifest(folder, about, (*MODEL_FILES, *TOKENIZER_FILES))


def load_folder(folder: Path) -> PortableModel:
    """Read a model of this package in float32, and its tokenizer if there is one, from a folder for transformers.

    If the folder comes from `save_pretrained`, the experiment and the step are unknown. No code of the folder is run.
    """
    about = require_sound(folder, (*MODEL_FILES, *TOKENIZER_FILES))
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        if not isinstance(config, RecurraConfig):
            raise ValueError(f"{folder} holds a model of type {config.model_type!r}; expected a model of this package")
        kind = next(kind for kind in MODELS if kind.config_class is type(config))
        with _quietly():
            model = kind.from_sound_folder(folder, config=config, dtype=torch.float32)
        tokenizer = read_tokenizer(folder)
    except OSError:
        raise
    except ValueError as error:
        reason = " ".join(str(error).split())  # transformers writes several lines
        raise ValueError(reason if str(folder) in reason else f"{folder}: {reason}") from error
    # Besides these, transformers raises what a strange file leads to.
    except Exception as error:
        reason = " ".join(str(error).split())
        got = f"a folder that transformers cannot read ({type(error).__name__}: {reason})"
        raise ValueError(sentence(str(folder), got, "one that save_pretrained wrote")) from error
    if tokenizer is not None and len(tokenizer) != config.vocab_size:
        raise ValueError(
            f"{folder} has a tokenizer of {len(tokenizer)} tokens and a model of {config.vocab_size}; remove "
            "tokens that were added to the tokenizer, for padding for example"
        )
    return PortableModel(model.model, tokenizer, about.get("experiment"), about.get("step"))


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
