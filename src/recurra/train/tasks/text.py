"""Text: language modelling over a corpus, with any language model, fresh or from trained weights."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from recurra.checks import sentence
from recurra.convert.portable import load_single_file
from recurra.convert.published.folder import ARCHITECTURES, from_huggingface, model_type_of, without_unused_tokens
from recurra.data.batches import IGNORED_TARGET, Batch, DataSet
from recurra.data.corpus import ENCODERS
from recurra.data.text import TextConfig, TextData, has_prepared
from recurra.models.registry import DataSizes, ModelEntry, list_models
from recurra.streams.continuation import TextEncoder, first_tokens, start_of
from recurra.train.checkpoint import load_weights, scored_weights
from recurra.train.evaluate import perplexity
from recurra.train.experiment import Experiment
from recurra.train.run_folder import RunFolder, is_checkpoint, load_best_checkpoint
from recurra.train.task import TokenTask, register_task


@register_task("text")
class TextTask(TokenTask):
    """Beside a run lies its tokenizer, which tells what the model's numbers mean wherever the text lies."""

    data = TextConfig

    def models(self) -> list[ModelEntry]:
        return list_models(DataSizes)

    def open_data(self, data: TextConfig, folder: RunFolder, *, rank: int = 0, world_size: int = 1) -> TextData:
        """Open the text, read with the vocabulary in the run's folder, whatever the training file contains now."""
        own, given = folder.tokenizer, Path(data.tokenizer) if data.tokenizer else None
        # A file that is gone has moved since the run began, which has a copy.
        is_gone = given is not None and not given.is_file()
        known = None if given is None or is_gone else data.load_tokenizer(given).fingerprint
        if known not in (None, data.load_tokenizer(own).fingerprint):
            got, hint = f"{data.tokenizer}, another vocabulary", "omit it, for the run has a vocabulary of its own"
            raise ValueError(sentence("data.tokenizer", got, f"that in {own}", hint))
        # The cache may have the shards that the run began with; by its own vocabulary they would be made again.
        is_plain = data.source in ("folder", "shards")
        if is_plain or is_gone or not has_prepared(data, data.load_tokenizer(own)):
            data = replace(data, tokenizer=str(own))
        return data.build(rank=rank, world_size=world_size)

    def fingerprint(self, opened: TextData) -> str:
        return opened.fingerprint()

    def sizes(self, data: TextConfig, opened: Any) -> DataSizes:
        return DataSizes(opened.vocab_size, opened.output_size, data.segment_length)

    def sizes_of_run(self, run: Any) -> DataSizes:
        return self.sizes_of_vocabulary(run.experiment, len(run.tokenizer))

    def sizes_of_vocabulary(self, experiment: Experiment, n_tokens: int) -> DataSizes:
        return DataSizes(n_tokens, n_tokens, experiment.data.segment_length)

    def load_initial_weights(self, model: nn.Module, path: str, data: DataSet | None = None) -> str:
        return start_language_model(model, path, getattr(getattr(data, "corpus", None), "encoder", None))

    def save_extras(self, opened: TextData, folder: RunFolder) -> None:
        if not folder.tokenizer.exists():
            encoder: Any = opened.corpus.encoder  # what a config makes can be saved
            encoder.save(folder.tokenizer)

    def has_tokenizer(self) -> bool:
        return True

    def tokenizer(self, run: Any) -> Any:
        return run.experiment.data.load_tokenizer(run.folder.tokenizer)

    def explored(self, run: Any) -> dict[str, Any]:
        start, before = first_tokens(run.tokenizer), list(start_of(run.tokenizer))
        return {"kind": "text", "start": start, "before": before, "examples": example_prompts(run.tokenizer)}

    def n_steps(self, experiment: Experiment) -> int:
        n_tokens: int = experiment.data.segment_length
        return n_tokens

    def lengths(self, experiment: Experiment) -> dict[str, int]:
        lengths = {"segment_length": experiment.data.segment_length}
        if hasattr(experiment.model, "mem_len"):
            memory = experiment.model.mem_len
            lengths["mem_len"] = experiment.data.segment_length if memory is None else memory
        return lengths

    def curve(self, records: Sequence[dict[str, Any]]) -> None:
        for record in records:
            loss = record["valid_loss"]
            record["valid_perplexity"] = None if loss is None else perplexity(loss, 1)

    def gate_tokens(self, batch: Batch) -> Tensor:
        lengths = ((batch.targets != IGNORED_TARGET) * torch.arange(1, batch.targets.shape[1] + 1)).amax(1)
        longest = int(lengths.argmax())
        return batch.inputs[longest : longest + 1, : int(lengths[longest])]


_PROMPTS = (
    *("Once upon a time", "In the beginning", "The meaning of life is", "It was the first time that"),
    *(
        "To be, or not to be",
        "The company said",
        "The first World War",
        "def main():",
        "Il était une fois",
        "Es war einmal ein",
    ),
)


def example_prompts(tokenizer: Any) -> list[str]:
    """Return three prompts that take few tokens in this vocabulary, so that its model may know such texts.

    A vocabulary of words that knows too few of them gives its first words.
    """
    words, unknown = getattr(tokenizer, "words", ()), getattr(tokenizer, "unk", None)
    prompts = [*_PROMPTS, *(prompt.lower().replace(",", " ,") for prompt in _PROMPTS if words)]
    tokens = {prompt: tokenizer.encode(prompt).tolist() for prompt in prompts}
    known = [prompt for prompt in prompts if unknown not in tokens[prompt]]
    if not words:
        known.sort(key=lambda prompt: len(tokens[prompt]) / len(prompt))
    return (known + [word for word in words[:100] if word.isalpha()])[:3]


# --- weights to start from: a run's, a single file's, or a published model's ---

_READ = "the folder of a run, a checkpoint, a .safetensors file of ours, or a folder or GGUF file of a published model"


def start_language_model(model: nn.Module, path: str, encoder: TextEncoder | None = None) -> str:
    """Load trained weights into a fresh language model of the same shape and vocabulary; dropouts may differ.

    path: a run's folder (its best checkpoint), a checkpoint, a single file (.safetensors), or a published model.
    encoder: of the text that the model is trained on; None takes any. Returns a line that says what was done.
    """
    place = Path(path).expanduser()
    if not place.exists():
        raise FileNotFoundError(sentence("init_from", f"{place}, which does not exist", _READ))
    weights, theirs, what, tokenizer = _read(place)
    config: Any = model.config
    ours, sizes = _shape(config), config.sizes_from_data()
    differing = [
        f"{name} {value!r}, not {ours[name]!r}"
        for name, value in theirs.items()
        if name in ours
        and _undropped(value) != ours[name]
        and not (value is None and name in sizes)  # a run's recipe, whose data gave it
    ]
    if differing:
        raise ValueError(sentence(what, f"a model with {'; '.join(differing)}", "one of the recipe's shape"))
    if None not in (encoder, tokenizer) and encoder.fingerprint != tokenizer.fingerprint:  # type: ignore[union-attr]
        hint = "set data.tokenizer to its tokenizer.json"
        raise ValueError(sentence(what, "a model with another vocabulary of the same size", "that of the data", hint))
    load_weights(model, weights, place)
    return f"starts from {what}"


def _read(place: Path) -> tuple[Mapping[str, Tensor], dict[str, Any], str, TextEncoder | None]:
    """Weights by our names, the shape of their model, what messages call them, and the tokenizer if there is one."""
    if place.suffix == ".safetensors" and not is_checkpoint(place):
        portable = load_single_file(place)
    elif place.suffix == ".gguf" or ((place / "config.json").is_file() and model_type_of(place) in ARCHITECTURES):
        portable = without_unused_tokens(from_huggingface(place))
    elif is_checkpoint(place):
        file, saved = load_best_checkpoint(place)
        what, config = f"{file}, step {saved['position']['step']}", saved["config"]
        own, kind = RunFolder(file.parent.parent).tokenizer, config["data"].get("vocabulary")
        tokenizer = ENCODERS[kind].load(own) if own.is_file() and kind in ENCODERS else None
        return scored_weights(saved), config["model"], what, tokenizer
    else:
        raise ValueError(sentence("init_from", f"{place}, which is none of these", _READ))
    return portable.model.state_dict(), _shape(portable.model.config), str(place), portable.tokenizer


def _shape(config: Any) -> dict[str, Any]:
    """A model's settings as YAML has them, without dropouts; by default there are as many outputs as tokens."""
    shape = _undropped(asdict(config))
    if "output_size" in shape and shape["output_size"] is None:
        shape["output_size"] = shape["vocab_size"]
    return dict(shape)


def _undropped(value: Any) -> Any:
    """A setting as YAML has it, without the dropouts in it."""
    if isinstance(value, Mapping):
        return {name: _undropped(item) for name, item in value.items() if "dropout" not in name}
    return [_undropped(item) for item in value] if isinstance(value, (list, tuple)) else value
