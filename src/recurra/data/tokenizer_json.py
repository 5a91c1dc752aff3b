"""The files of the `tokenizers` library, tokenizer.json: checked before the library sees them.

The library aborts the process for some numbers of tokens, and takes over what is damaged but still JSON. Our own files
carry a digest inside the key `model`, where the library and transformers pass over keys that they do not know.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from tokenizers import Tokenizer

from recurra.checks import kind_of, sentence
from recurra.files.digests import STAMP, checked_stamp, stamped
from recurra.files.reading import one_line, parse_json

MOST_TOKENIZER_BYTES = 256 * 2**20
"""Maximum size of a tokenizer.json."""
MOST_TOKENS = 2**24
"""Tokens have numbers below this: a model has a row of weights for each."""


def stamped_tokenizer(text: str) -> str:
    """Add its digest to a tokenizer.json."""
    content = stamped(json.loads(text))
    content["model"] = {**content["model"], STAMP: content.pop(STAMP)}
    return json.dumps(content, ensure_ascii=False, indent=2)


def parse_tokenizer(text: str, name: str) -> dict[str, Any]:
    """Read a tokenizer.json, compare it with its digest if it carries one, and check the numbers of its tokens.

    Args:
        text: the content of the file.
        name: what messages call it.

    Returns:
        the content, without the digest.

    Raises:
        ValueError: it is no tokenizer.json, or damaged, or has numbers that tokens cannot have.
    """
    content: dict[str, Any] = parse_json(text, name)
    model = content.get("model")
    if not isinstance(model, dict):
        raise ValueError(sentence(name, f"JSON whose model is {kind_of(model)}", "a tokenizer.json"))
    if STAMP in model:
        inside = {key: value for key, value in model.items() if key != STAMP}
        content = checked_stamp({**content, "model": inside, STAMP: model[STAMP]}, name)
    _require_numbers(content, name)
    return content


def tokenizer_of(content: Mapping[str, Any], name: str) -> Tokenizer:
    """Make the tokenizer of what `parse_tokenizer` returned.

    Raises:
        ValueError: the library refuses it.
    """
    try:
        with library_errors():
            return Tokenizer.from_str(json.dumps(content))
    except ValueError as error:
        raise ValueError(sentence(name, f"unreadable ({error})", "a tokenizer.json")) from error


@contextmanager
def library_errors() -> Iterator[None]:
    """Turn the errors of the library, bare Exceptions and panics of Rust, into ValueErrors of one line."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError):
        raise
    except BaseException as error:  # a panic is no Exception
        raise ValueError(one_line(error)) from error


def _require_numbers(content: Mapping[str, Any], name: str) -> None:
    vocabulary = content["model"].get("vocab", {})
    if isinstance(vocabulary, dict):
        numbers = list(vocabulary.values())
        _require_tokens(numbers, name)
        if len(set(numbers)) < len(numbers):
            raise ValueError(sentence(name, "a tokenizer with two tokens of one number", "a number for each token"))
    elif not isinstance(vocabulary, list) or len(vocabulary) > MOST_TOKENS:
        raise ValueError(sentence(name, f"a tokenizer whose vocab is {kind_of(vocabulary)}", "its tokens"))
    added = content.get("added_tokens") or []
    if not (isinstance(added, list) and all(isinstance(token, dict) for token in added)):
        raise ValueError(sentence(name, "a tokenizer whose added_tokens are not objects", "a list of them"))
    _require_tokens([token.get("id") for token in added], name)


def _require_tokens(numbers: list[Any], name: str) -> None:
    for number in numbers:
        if type(number) is not int or not 0 <= number < MOST_TOKENS:
            came = f"a tokenizer with a token of the number {repr(number)[:60]}"
            raise ValueError(sentence(name, came, f"whole numbers from 0 to {MOST_TOKENS - 1}"))
