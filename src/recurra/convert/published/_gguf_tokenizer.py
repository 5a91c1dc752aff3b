"""The tokenizer in a GGUF file: `tokenizer.ggml.*` as llama.cpp reads it, and a copy of tokenizer.json."""

import json
from collections.abc import Mapping
from typing import Any

from gguf import GGUFWriter, Keys, TokenType
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from recurra.checks import choose, kind_of, require, sentence
from recurra.data.tokenizers import BytePairEncoding, library_errors
from recurra.streams.continuation import TextEncoder

_KEYS = Keys.Tokenizer
_BLANK = "\u2581"
"""What SentencePiece writes for a blank."""
_ENDS = ("<|endoftext|>", "</s>", "<eos>", "<|im_end|>", "<|eot_id|>", "<|end_of_text|>", "<0xFF>", "\xff")
"""Tokens that end a text; the last two are a byte that no text has."""


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Split(Regex(pattern), behavior="isolated")


_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False)
_BYTES_ALONE = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
_DIGITS = pre_tokenizers.Digits(individual_digits=False)
_CUTS: dict[str, list[Any]] = {
    "gpt-2": [_BYTES],
    "llama-bpe": [_split(_WORDS % "{1,3}"), _BYTES_ALONE],
    "qwen2": [_split(_WORDS % ""), _BYTES_ALONE],
    "falcon": [pre_tokenizers.Punctuation("contiguous"), _BYTES, _DIGITS, _split("[0-9][0-9][0-9]")],
}
"""Pre-tokenizers (how a text is split into words), by llama.cpp's names."""
_ALIASES = {"mpt": "gpt-2", "olmo": "gpt-2", "jais": "gpt-2", "phi-2": "gpt-2", "falcon3": "llama-bpe"}


def read_tokenizer(metadata: Mapping[str, Any], path: str) -> BytePairEncoding | None:
    """Build the tokenizer from a GGUF file's metadata; None if it has none."""
    name = f"the tokenizer in {path}"
    if isinstance(whole := metadata.get(_KEYS.HF_JSON), str):
        return BytePairEncoding.from_json(whole, name)
    kind = str(metadata.get(_KEYS.MODEL, "none"))
    if kind in ("none", "no_vocab"):
        return None
    read = choose(f"{_KEYS.MODEL} in {path}", {"gpt2": _read_bytes, "llama": _read_pieces}, kind)
    words, types = _list(metadata, _KEYS.LIST, str, path), _list(metadata, _KEYS.TOKEN_TYPE, int, path)
    while types and types[-1] == TokenType.UNUSED:  # padding of the vocabulary
        types.pop()
    words = words[: len(types)]
    try:
        with library_errors():
            tokenizer, starts = read(metadata, words, types, path)
            tokenizer.add_tokens(
                [
                    AddedToken(word, normalized=False, special=kind == TokenType.CONTROL)
                    for word, kind in zip(words, types, strict=True)
                    if kind in (TokenType.CONTROL, TokenType.USER_DEFINED)
                ]
            )
            if metadata.get(_KEYS.ADD_BOS, starts):
                start = words[metadata.get(_KEYS.BOS_ID, 1)]
                tokenizer.post_processor = processors.TemplateProcessing(
                    single=[start, "$A"], special_tokens=[(start, words.index(start))]
                )
        return BytePairEncoding(tokenizer)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def _list(metadata: Mapping[str, Any], key: str, kind: type, path: str) -> list[Any]:
    found = metadata.get(key)
    if not isinstance(found, list) or not all(isinstance(one, kind) for one in found):
        raise ValueError(sentence(f"{key} in {path}", kind_of(found), f"a list of {kind.__name__}"))
    return list(found)


def _read_bytes(metadata: Mapping[str, Any], words: list[str], _: list[int], path: str) -> tuple[Tokenizer, bool]:
    """Return GPT-2's byte-level BPE, and whether texts begin with a start token by default."""
    cuts = str(metadata.get(_KEYS.PRE, "gpt-2"))  # older files lack the key
    cuts = _ALIASES.get(cuts, cuts)
    parts = choose(f"{_KEYS.PRE} in {path}", _CUTS, cuts)
    merges = [pair.partition(" ")[::2] for pair in _list(metadata, _KEYS.MERGES, str, path)]
    numbers, starts = {word: number for number, word in enumerate(words)}, cuts == "llama-bpe"
    tokenizer = Tokenizer(models.BPE(numbers, merges, ignore_merges=starts))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, starts


def _read_pieces(metadata: Mapping[str, Any], words: list[str], types: list[int], path: str) -> tuple[Tokenizer, bool]:
    """SentencePiece's BPE: two pieces merge if the result is in the vocabulary, the highest score first."""
    numbers, merges = {word: number for number, word in enumerate(words)}, []
    for word, kind, score in zip(words, types, _list(metadata, _KEYS.SCORES, float, path), strict=False):
        halves = [(word[:end], word[end:]) for end in range(1, len(word))] if kind == TokenType.NORMAL else []
        merges += [(-score, numbers[word], pair) for pair in halves if numbers.keys() >= set(pair)]
    unknown = next((word for word, kind in zip(words, types, strict=True) if kind == TokenType.UNKNOWN), None)
    pairs = [pair for *_, pair in sorted(merges)]
    tokenizer = Tokenizer(models.BPE(numbers, pairs, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    steps: list[Any] = [normalizers.Replace(" ", _BLANK)]
    back: list[Any] = [decoders.Replace(_BLANK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.get(_KEYS.ADD_PREFIX, True):
        steps.insert(0, normalizers.Prepend(_BLANK))
        back.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer, tokenizer.decoder = normalizers.Sequence(steps), decoders.Sequence(back)
    return tokenizer, True


def write_tokenizer(writer: GGUFWriter, tokenizer: TextEncoder | None, n_rows: int) -> None:
    """Write a tokenizer for a model of `n_rows` tokens; ids without a token become unused tokens."""
    content = json.loads(tokenizer.to_json()) if isinstance(tokenizer, BytePairEncoding) else {}
    if not isinstance(tokenizer, BytePairEncoding) or content["model"]["type"] != "BPE":
        raise ValueError(sentence("the tokenizer", kind_of(tokenizer), "byte pairs, which llama.cpp has, too"))
    require(len(tokenizer) <= n_rows, "the tokenizer", f"{len(tokenizer)} tokens", f"the model's {n_rows} at most")
    require(len(tokenizer.start) <= 1, "the tokenizer", tokenizer.start, "at most one token in front of a text")
    model, words = content["model"], [f"[PAD{number}]" for number in range(n_rows)]
    types = [int(TokenType.UNUSED)] * n_rows
    for word, number in model["vocab"].items():
        is_byte = model["byte_fallback"] and word.startswith("<0x")
        words[number], types[number] = word, TokenType.BYTE if is_byte else TokenType.NORMAL
    for token in content["added_tokens"]:
        kind = TokenType.CONTROL if token["special"] else TokenType.USER_DEFINED
        words[token["id"]], types[token["id"]] = token["content"], kind
    if model["byte_fallback"]:
        types[model["vocab"][model["unk_token"]]] = TokenType.UNKNOWN
        ranks = {"".join(pair): rank for rank, pair in reversed(list(enumerate(model["merges"])))}
        writer.add_token_scores([-float(ranks.get(word, len(ranks))) for word in words])
        writer.add_add_space_prefix(words[tokenizer.encode("a")[0]].startswith(_BLANK))
    else:
        writer.add_tokenizer_pre(_name_of_cuts(content, tokenizer))
        writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
    writer.add_tokenizer_model("llama" if model["byte_fallback"] else "gpt2")
    writer.add_token_list(words)
    writer.add_token_types(types)
    writer.add_string(_KEYS.HF_JSON, tokenizer.to_json())
    end = next((words.index(word) for word in _ENDS if word in words), n_rows - 1)  # else llama.cpp uses token 11
    writer.add_eos_token_id(end)
    writer.add_bos_token_id(tokenizer.start[0] if tokenizer.start else end)
    writer.add_add_bos_token(bool(tokenizer.start))


def _name_of_cuts(content: Mapping[str, Any], tokenizer: BytePairEncoding) -> str:
    """Return llama.cpp's name of a pre-tokenizer, leaving out our split into lines, which has no name there."""
    whole = content["pre_tokenizer"] or {}
    parts = [part | {"trim_offsets": True} for part in whole.get("pretokenizers", [whole])]
    parts = parts[1:] if tokenizer.encodes_lines_apart else parts
    for name, cuts in _CUTS.items():
        known = [json.loads(cut.__getstate__()) | {"trim_offsets": True} for cut in cuts]
        if known == parts and content["normalizer"] in (None, {"type": "NFC"}):
            return name
    got = "one that cuts text into words in another way"
    raise ValueError(sentence("the tokenizer", got, f"that of {', '.join(_CUTS)}, which llama.cpp has, too"))
