"""recurra.json: what transformers does not ask for, and the digests by which damage to a folder is recognised."""

from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

from recurra.checks import kind_of, sentence
from recurra.files.archives import ArchiveError, check_archive
from recurra.files.digests import file_sha256, note_missing_digest
from recurra.files.reading import read_json
from recurra.files.stamped_json import read_stamped, write_stamped
from recurra.files.typed import require_fields

ORIGIN = "recurra.json"
MODEL_FILES = ("config.json", "generation_config.json", "*.safetensors", "*.safetensors.index*.json")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")

_FORMAT = 2
_KEYS = {1: {"format", "step", "experiment"}, 2: {"format", "step", "experiment", "files"}}
_TYPES = {"step": int | None, "experiment": dict[str, Any] | None, "files": dict[str, str]}
_MOST_INDEX_BYTES = 32 * 2**20
_WITH_CODE = ("config.json", "tokenizer_config.json", "generation_config.json")
_MEND = "write the folder again, or delete recurra.json if you changed the file yourself"


class Origin(NamedTuple):
    """What recurra.json says.

    experiment: the run's whole experiment as plain data; None if the model comes from elsewhere.
    step: the update after which the weights were saved; None likewise.
    files: the digests of the folder's files by name; None in an older folder, or one of others.
    """

    experiment: dict[str, Any] | None = None
    step: int | None = None
    files: dict[str, str] | None = None


def read_origin(folder: Path) -> Origin:
    """Read a folder's recurra.json; nothing is known without it.

    Raises:
        OSError: it cannot be read.
        ValueError: it is damaged, or of another format.
    """
    path = folder / ORIGIN
    if not path.is_file():
        return Origin()
    content = read_stamped(path, allow_nan=True, mend=_MEND)
    form = content.get("format")
    if form not in _KEYS or isinstance(form, bool):
        raise ValueError(sentence(str(path), f"in format {form!r}", f"format {_FORMAT}"))
    if content.keys() != _KEYS[form]:
        raise ValueError(sentence(str(path), f"one with {', '.join(sorted(content))}", ", ".join(sorted(_KEYS[form]))))
    require_fields(content, _TYPES, str(path), finite=False)
    return Origin(content["experiment"], content["step"], content.get("files"))


def write_origin(folder: Path, origin: Origin, patterns: Iterable[str]) -> None:
    """Write recurra.json, with new digests of the files that fit `patterns` and the old ones of others that are there.

    Raises:
        OSError: a file cannot be read or written.
    """
    patterns = tuple(patterns)
    kept = {
        name: digest
        for name, digest in (origin.files or {}).items()
        if not _fits(name, patterns) and (folder / name).is_file()
    }
    new = {path.name: file_sha256(path) for path in _files(folder, patterns)}
    content = {
        "format": _FORMAT,
        "step": origin.step,
        "experiment": origin.experiment,
        "files": dict(sorted({**kept, **new}.items())),
    }
    write_stamped(folder / ORIGIN, content)


def require_sound(folder: Path, patterns: Iterable[str]) -> Origin:
    """Refuse a folder with files that are not what they should be, before transformers reads them.

    Refused are code in the folder; names of weights outside it; files that do not match their digests in recurra.json;
    weights that are no safetensors file, or no archive of torch.save. Files without a digest are noted in the log.

    Raises:
        OSError: a file cannot be read.
        ValueError: naming the file.
    """
    patterns = tuple(patterns)
    origin = read_origin(folder)
    files = origin.files or {}
    for name in sorted(name for name in files if _fits(name, patterns)):
        path = folder / name
        if not path.is_file():
            came = f"missing, although {ORIGIN} lists it"
            raise ValueError(sentence(str(path), came, "the folder as it was written", "copy it again"))
        if file_sha256(path) != files[name]:
            came = f"damaged: its content does not match its digest in {ORIGIN}"
            raise ValueError(sentence(str(path), came, "the file that was written", _MEND))
    if without := [path.name for path in _files(folder, patterns) if path.name not in files]:
        note_missing_digest(f"{folder} ({', '.join(without)})")
    _require_no_code(folder)
    _require_own_weights(folder)
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt"):
                pass
        except (SafetensorError, ValueError, TypeError) as error:
            came = f"damaged or no safetensors file ({error})"
            raise ValueError(sentence(str(path), came, "weights that save_pretrained wrote")) from error
    for path in sorted(folder.glob("pytorch_model*.bin")):
        try:
            check_archive(path)
        except ArchiveError as error:
            raise ValueError(
                sentence(str(path), f"no archive of weights ({error})", "what torch.save wrote")
            ) from error
    return origin


def _require_no_code(folder: Path) -> None:
    for name in _WITH_CODE:
        path = folder / name
        if path.is_file() and "auto_map" in read_json(path, allow_nan=True):
            came = "a file with auto_map, which names code to run"
            raise ValueError(sentence(str(path), came, "a folder without code of its own", "remove auto_map"))


def _require_own_weights(folder: Path) -> None:
    for path in sorted(folder.glob("*.index*.json")):
        names = read_json(path, most_bytes=_MOST_INDEX_BYTES, allow_nan=True).get("weight_map")
        if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
            raise ValueError(sentence(f"weight_map in {path}", kind_of(names), "an object of names of files"))
        for name in sorted(set(names.values())):
            if name in ("", ".", "..") or "/" in name or "\\" in name:
                raise ValueError(sentence(f"weight_map in {path}", f"one with {name!r}", "names of files beside it"))


def _files(folder: Path, patterns: tuple[str, ...]) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_file() and _fits(path.name, patterns))


def _fits(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)
