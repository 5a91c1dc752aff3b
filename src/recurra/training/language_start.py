"""The weights that a language model starts from: a run's, a single file's, or a published model's."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from recurra.checks import sentence
from recurra.convert import load_single_file
from recurra.convert.published import ARCHITECTURES, from_huggingface, model_type_of, without_unused_tokens
from recurra.data import TextEncoder
from recurra.data.shards import ENCODERS
from recurra.training.checkpoint import load_weights, scored_weights
from recurra.training.run_folder import RunFolder, is_checkpoint, load_best_checkpoint

_READ = "the folder of a run, a checkpoint, a .safetensors file of ours, or a folder of a published model"


def start_language_model(model: nn.Module, path: str, encoder: TextEncoder | None = None) -> str:
    """Load trained weights into a fresh language model of the same shape and vocabulary; dropouts may differ.

    Args:
        model: changed in place.
        path: the folder of a run (its best checkpoint), a checkpoint of a run, a single file (.safetensors), or
            a folder of a published model that `recurra convert` reads.
        encoder: of the text that the model is trained on, whose numbers have to mean the words that they meant; None
            takes any.

    Returns:
        a line that says what was done.

    Raises:
        FileNotFoundError: the path does not exist.
        ValueError: it has no weights of a language model, or of another shape or vocabulary.
    """
    place = Path(path).expanduser()
    if not place.exists():
        raise FileNotFoundError(sentence("init_from", f"{place}, which does not exist", _READ))
    weights, shape, what, tokenizer = _read(place)
    config: Any = model.config
    ours, sizes = asdict(config), config.sizes_from_data()
    differing = [
        f"{name} {value!r}, not {ours[name]!r}"
        for name, value in shape.items()
        if name in ours
        and "dropout" not in name
        and _undropped(value) != _undropped(ours[name])
        and not (value is None and name in sizes)  # a run's recipe, whose data gave it
    ]
    if differing:
        raise ValueError(sentence(what, f"a model with {'; '.join(differing)}", "one of the recipe's shape"))
    if None not in (encoder, tokenizer) and encoder.fingerprint != tokenizer.fingerprint:  # type: ignore[union-attr]
        mend = "set data.tokenizer to its tokenizer.json"
        raise ValueError(sentence(what, "a model with another vocabulary of the same size", "that of the data", mend))
    load_weights(model, weights, place)
    return f"starts from {what}"


def _read(place: Path) -> tuple[Mapping[str, Tensor], dict[str, Any], str, TextEncoder | None]:
    """Weights by our names, the shape of their model, what messages call them, and the tokenizer if there is one."""
    if place.suffix == ".safetensors" and not is_checkpoint(place):
        portable = load_single_file(place)
    elif (place / "config.json").is_file() and model_type_of(place) in ARCHITECTURES:
        portable = without_unused_tokens(from_huggingface(place))
    elif is_checkpoint(place):
        file, saved = load_best_checkpoint(place)
        what = f"{file}, step {saved['position']['step']}"
        return scored_weights(saved), saved["config"]["model"], what, _tokenizer_of(file, saved["config"]["data"])
    else:
        raise ValueError(sentence("init_from", f"{place}, which is none of these", _READ))
    shape = asdict(portable.model.config)  # type: ignore[call-overload]
    return portable.model.state_dict(), shape, str(place), portable.tokenizer


def _tokenizer_of(checkpoint: Path, data: Mapping[str, Any]) -> TextEncoder | None:
    """The tokenizer of a checkpoint's run, if the file still lies in its folder."""
    file = RunFolder(checkpoint.parent.parent).tokenizer
    return ENCODERS[data["vocabulary"]].load(file) if file.is_file() and data.get("vocabulary") in ENCODERS else None


def _undropped(value: Any) -> Any:
    """A setting as YAML has it, without the dropouts of mixers, which stand in dicts, in lists for several mixers."""
    if isinstance(value, Mapping):
        return {name: _undropped(item) for name, item in value.items() if "dropout" not in name}
    return [_undropped(item) for item in value] if isinstance(value, (list, tuple)) else value
