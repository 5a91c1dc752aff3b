"""Chat templates of published folders."""

import json
from pathlib import Path
from typing import Any

from recurra._files.reading import read_json, read_text
from recurra.data.tokenizers import BytePairEncoding

TEMPLATE = "chat_template.jinja"
_ENDS = "eos_tokens"
_EOS_IDS = "eos_token_id"


def read_chat_template(folder: Path, tokenizer: BytePairEncoding) -> str | None:
    """Read the chat template of a folder for transformers; None if it has none.

    Its first lines then set what a template alone does not know: bos_token and eos_token as the folder names them, and
    eos_tokens, the texts of all tokens at which the model ends an answer.
    """
    file, settings = folder / TEMPLATE, _entries(folder / "tokenizer_config.json")
    template: Any = read_text(file) if file.is_file() else settings.get("chat_template")
    if isinstance(template, list):  # older folders may have several, by name
        named = (one for one in template if isinstance(one, dict) and one.get("name") == "default")
        template = next(named, {}).get("template")
    if not isinstance(template, str):
        return None
    if f"{{% set {_ENDS} =" in template:
        return template
    special = {name: _text(settings.get(name)) for name in ("bos_token", "eos_token")}
    sources = (_entries(folder / "generation_config.json"), _entries(folder / "config.json"))
    ids: Any = next((entries[_EOS_IDS] for entries in sources if entries.get(_EOS_IDS) is not None), [])
    ids = [
        number
        for number in (ids if isinstance(ids, list) else [ids])
        if type(number) is int and 0 <= number < len(tokenizer)
    ]
    ends = dict.fromkeys([special["eos_token"], *(tokenizer.decode([number]) for number in ids)])
    values = {**special, _ENDS: [end for end in ends if end]}
    lines = (
        f"{{% set {name} = {json.dumps(value, ensure_ascii=False)} %}}\n" for name, value in values.items() if value
    )
    return "".join([*lines, template])


def _entries(file: Path) -> dict[str, Any]:
    return read_json(file, allow_nan=True) if file.is_file() else {}


def _text(token: Any) -> str | None:
    """The text of a special token, which may be an object."""
    found = token.get("content") if isinstance(token, dict) else token
    return found if isinstance(found, str) else None
