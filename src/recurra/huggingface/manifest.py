"""Which files of a folder for transformers have digests in its manifest, and what is refused before it is read."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from recurra.checks import kind_of, sentence
from recurra.files.digests import MANIFEST, read_manifest, require_files
from recurra.files.reading import read_json, require_fields
from recurra.files.weights import read_metadata

MODEL_FILES = ("config.json", "generation_config.json", "*.safetensors", "*.safetensors.index*.json")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")

_ABOUT = {"step": int | None, "experiment": dict[str, Any] | None, "files": dict[str, str]}
_MOST_INDEX_BYTES = 32 * 2**20
_WITH_CODE = ("config.json", "tokenizer_config.json", "generation_config.json")


def require_sound(folder: Path, patterns: Iterable[str]) -> dict[str, Any]:
    """Refuse a folder with files that are not what they should be, before transformers reads them.

    Refused are files that do not match their digests in the manifest, if there is one; code in the folder; names of
    weights outside it; and weights that are no safetensors file.

    Returns:
        the manifest: the run's whole experiment as plain data and the update after which the weights were saved, None
        where they are unknown; and the digests. Empty without a manifest.

    Raises:
        OSError: a file cannot be read.
        ValueError: naming the file.
    """
    manifest = read_manifest(folder)
    require_fields(manifest, _ABOUT, str(folder / MANIFEST), finite=False)
    require_files(folder, manifest.get("files", {}), patterns)
    _require_no_code(folder)
    _require_own_weights(folder)
    for path in sorted(folder.glob("*.safetensors")):
        read_metadata(path, "weights that save_pretrained wrote")
    return manifest


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
