"""A language model and its tokenizer as a folder that transformers loads, and back.

A tokenizer gives the same ids for every text, and the same text back.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerFast
from transformers.utils import logging

from recurra._files.digests import write_manifest
from recurra._files.reading import read_text
from recurra._files.writing import put_in_place
from recurra.checks import kind_of, sentence
from recurra.convert.huggingface.configuration import MODEL_FILES, TOKENIZER_FILES, RecurraConfig, require_sound
from recurra.convert.huggingface.modeling import RecurraForCausalLM, causal_lm
from recurra.convert.portable import PortableModel
from recurra.data.tokenizers import (
    EOS,
    UNK,
    BytePairEncoding,
    Vocabulary,
    library_errors,
    parse_tokenizer,
    tokenizer_of,
)
from recurra.streams.continuation import TextEncoder, encode_first, first_tokens

# A blank between two words, which the decoder for words can only put where a prefix is missing: no word has this one,
# for none has white space.
_NO_PREFIX = " \0"
# What Python's str.split takes for white space and Unicode, and with it the library, does not.
_SEPARATORS = "[\x1c-\x1f]"
_PROBES = (
    "a cat and a dog\nthe dog\n\n\n saw  a cat \n",
    " leading\tand\x1cseparated\u3000by  \u00a0 all\r\nkinds of\u2028blanks\u0085\n \n",
    "naïve façade — 日本語 🙂 x<eos>y <unk> <eos>\n1,234.5 don't\n",
)


def fast_tokenizer(encoder: TextEncoder) -> PreTrainedTokenizerFast:
    """Return a run's tokenizer as a transformers tokenizer.

    It pads on the left and has no padding token: set `pad_token` to any token, because the attention mask hides it. In
    a word-level vocabulary, <eos>, the end of a line, also begins a text; byte pair encodings add the tokens that their
    tokenizer.json puts before a text, and none after it.

    Args:
        encoder: a `Vocabulary` or a `BytePairEncoding`.
    """
    options: dict[str, Any] = {"padding_side": "left", "clean_up_tokenization_spaces": False}
    if isinstance(encoder, Vocabulary):
        tokenizer = _of_words(encoder)
        # special tokens of the text are words like others: x<eos>y is one word, and not a known one
        options |= {"bos_token": EOS, "eos_token": EOS, "unk_token": UNK, "split_special_tokens": True}
    elif isinstance(encoder, BytePairEncoding):
        tokenizer = _of_byte_pairs(encoder)
    else:
        got = f"a {type(encoder).__name__}"
        raise ValueError(sentence("the tokenizer", got, "words or byte pairs, which transformers has, too"))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_input_names=["input_ids", "attention_mask"], **options
    )
    _require_equal(encoder, fast, "the tokenizer")
    return fast


def read_tokenizer(folder: Path) -> TextEncoder | None:
    """Read the tokenizer of a folder that transformers loads; None if there is no tokenizer.json."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    content = parse_tokenizer(read_text(path), str(path))
    if content["model"].get("type") == "WordLevel":
        encoder: TextEncoder = _words_of(content["model"].get("vocab"), path)
    else:
        encoder = BytePairEncoding(tokenizer_of(content, str(path)))
        if not encoder.start:  # transformers writes a post-processor that adds nothing
            encoder = BytePairEncoding(tokenizer_of({**content, "post_processor": None}, str(path)))
    try:
        with library_errors():
            theirs = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
            _require_equal(encoder, theirs, f"the tokenizer of {folder}")
    except ValueError as error:
        raise ValueError(sentence(str(path), f"unreadable ({error})", "one that `recurra convert` wrote")) from error
    return encoder


def _words_of(numbers: Mapping[str, int] | None, path: Path) -> Vocabulary:
    if not isinstance(numbers, dict):
        raise ValueError(sentence(f"the vocabulary in {path}", kind_of(numbers), "words and their numbers"))
    words = sorted(numbers, key=numbers.__getitem__)
    if sorted(numbers.values()) != list(range(len(words))):
        got = "one whose words are not numbered from 0 without gaps"
        raise ValueError(sentence(f"the vocabulary in {path}", got, f"numbers 0 to {len(words) - 1}"))
    try:
        return Vocabulary(words)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def text_start(encoder: TextEncoder) -> int | None:
    """The token that a text without a prompt begins with: the encoder's own, or a line feed; None for several."""
    tokens = first_tokens(encoder)
    return tokens[0] if len(tokens) == 1 else None


def _of_words(vocabulary: Vocabulary) -> Tokenizer:
    words = {word: number for number, word in enumerate(vocabulary.words)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=UNK))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Replace("\n", f" {EOS} "), normalizers.Replace(Regex(_SEPARATORS), " ")]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.WordPiece(prefix=_NO_PREFIX, cleanup=False),  # puts blanks between the words
            decoders.Fuse(),
            decoders.Replace(Regex(f"(^| ){EOS}(?= |$)"), "\n"),
            decoders.Replace("\n ", "\n"),
        ]
    )
    return tokenizer


def _of_byte_pairs(encoder: BytePairEncoding) -> Tokenizer:
    """The tokenizer without what it adds behind a text, after which no run continues."""
    tokenizer = Tokenizer.from_str(encoder.to_json())
    start = [(tokenizer.id_to_token(token), token) for token in encoder.start]
    words = [*(word for word, _ in start), "$A"]
    tokenizer.post_processor = processors.TemplateProcessing(single=words, special_tokens=start) if start else None
    return tokenizer


def _require_equal(encoder: TextEncoder, fast: PreTrainedTokenizerFast, what: str) -> None:
    for text in _PROBES:
        ours, theirs = encoder.encode(text).tolist(), fast(text, add_special_tokens=False)["input_ids"]
        if ours != theirs:
            raise ValueError(
                f"{what} cannot be taken over: {text!r} becomes {ours[:12]}... in a run, and {theirs[:12]}... in "
                "transformers"
            )
        first = encode_first(encoder, text).tolist()
        if isinstance(encoder, BytePairEncoding) and fast(text)["input_ids"] != first:
            raise ValueError(f"{what} cannot be taken over: in transformers it does not begin {text!r} as in a run")
        if encoder.decode(ours) != fast.decode(theirs):
            raise ValueError(f"{what} cannot be taken over: {ours[:12]}... is not the same text in transformers")


def save_folder(portable: PortableModel, folder: str | Path) -> None:
    """Write a model for transformers.

    It writes config.json, model.safetensors and generation_config.json, in which a text begins like a line; for the
    tokenizer, if there is one, tokenizer.json and tokenizer_config.json; and manifest.json, which has the digests of
    all these files and from which `recurra convert` rebuilds the run. The weights keep their dtype.

    Raises OSError. The folder is then unchanged, unless the new files were already being moved into place.
    """
    model = causal_lm(portable.model)
    tokenizer = None if portable.tokenizer is None else fast_tokenizer(portable.tokenizer)
    if portable.tokenizer is not None:
        model.generation_config.bos_token_id = text_start(portable.tokenizer)
    with put_in_place(Path(folder)) as scratch, _quietly():
        model.save_pretrained(scratch)
        if tokenizer is not None:
            tokenizer.save_pretrained(scratch)
        about = {"experiment": portable.experiment, "step": portable.step}
        write_manifest(scratch, about, (*MODEL_FILES, *TOKENIZER_FILES))


def load_folder(folder: str | Path) -> PortableModel:
    """Read a model of this package in float32, and its tokenizer if there is one, from a folder for transformers.

    If the folder comes from `save_pretrained`, the experiment and the step are unknown. No code of the folder is run.
    """
    folder = Path(folder)
    about = require_sound(folder, (*MODEL_FILES, *TOKENIZER_FILES))
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        if not isinstance(config, RecurraConfig):
            raise ValueError(f"{folder} holds a model of type {config.model_type!r}; expected a model of this package")
        with _quietly():
            model = RecurraForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32)
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
