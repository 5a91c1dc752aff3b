"""Text: language modelling over a corpus, with any language model."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from recurra.checks import sentence
from recurra.data.batches import IGNORED_TARGET, Batch, DataSet
from recurra.data.text import TextConfig, TextData, has_prepared
from recurra.models.registry import DataSizes, ModelEntry, list_models
from recurra.streams.continuation import first_tokens, start_of
from recurra.train.evaluate import perplexity
from recurra.train.experiment import Experiment
from recurra.train.run_folder import RunFolder
from recurra.train.start import start_language_model
from recurra.train.task import register_task
from recurra.train.tasks.tokens import TokenTask


@register_task("text")
class TextTask(TokenTask):
    """Beside a run lies its tokenizer, which tells what the model's numbers mean wherever the text lies."""

    data = TextConfig

    def models(self) -> list[ModelEntry]:
        """List all language models."""
        return list_models(DataSizes)

    def open_data(self, data: TextConfig, folder: RunFolder, *, rank: int = 0, world_size: int = 1) -> TextData:
        """Open the text, read with the vocabulary in the run's folder, whatever the training file contains now.

        As many words in another order would fit the model, and mean something else. A folder without a vocabulary is an
        older run's; its corpus makes one anew.
        """
        own = folder.tokenizer
        if own.exists():
            _require_own_vocabulary(data, own)
            if not _is_prepared(data, own):
                data = replace(data, tokenizer=str(own), bpe_vocab_size=None)
        return data.build(rank=rank, world_size=world_size)

    def sizes(self, data: TextConfig, opened: Any) -> DataSizes:
        """Return the vocabulary and the length of a segment."""
        return DataSizes(opened.vocab_size, opened.output_size, data.segment_length)

    def sizes_of_run(self, run: Any) -> DataSizes:
        """Ask the run's tokenizer."""
        return self.sizes_of_vocabulary(run.experiment, len(run.tokenizer))

    def sizes_of_vocabulary(self, experiment: Experiment, n_tokens: int) -> DataSizes:
        """Return the sizes for a vocabulary, without the text."""
        return DataSizes(n_tokens, n_tokens, experiment.data.segment_length)

    def load_initial_weights(self, model: nn.Module, path: str, data: DataSet | None = None) -> str:
        """Load the weights of a language model of the same shape and vocabulary."""
        return start_language_model(model, path, getattr(getattr(data, "corpus", None), "encoder", None))

    def save_extras(self, opened: TextData, folder: RunFolder) -> None:
        """Write the tokenizer, unless the run has one."""
        if not folder.tokenizer.exists():
            opened.save_tokenizer(folder.tokenizer)

    def has_tokenizer(self) -> bool:
        """It has."""
        return True

    def tokenizer(self, run: Any) -> Any:
        """Load the tokenizer from the folder, or from the corpus for older runs, which did not save it."""
        file = run.folder.tokenizer
        if file.exists():
            return run.experiment.data.load_tokenizer(file)
        try:
            return run.data.corpus.encoder
        except OSError as error:
            got = f"{run.folder.path}, which has no {file.name} and a corpus that cannot be read"
            hint = f"say where the corpus is with --data.path FOLDER ({error})"
            raise FileNotFoundError(sentence("run", got, "one of the two", hint)) from error

    def explored(self, run: Any) -> dict[str, Any]:
        """Say what a text begins with."""
        return {"kind": "text", "start": first_tokens(run.tokenizer), "before": list(start_of(run.tokenizer))}

    def n_steps(self, experiment: Experiment) -> int:
        """Count the tokens of a segment."""
        n_tokens: int = experiment.data.segment_length
        return n_tokens

    def lengths(self, experiment: Experiment) -> dict[str, int]:
        """Return the lengths of a segment and, if the model has one, of its memory."""
        lengths = {"segment_length": experiment.data.segment_length}
        if hasattr(experiment.model, "mem_len"):
            memory = experiment.model.mem_len
            lengths["mem_len"] = experiment.data.segment_length if memory is None else memory
        return lengths

    def curve(self, records: Sequence[dict[str, str]]) -> None:
        """Add the perplexity of each validation."""
        for record in records:
            loss = record["valid_loss"]
            record["valid_perplexity"] = str(perplexity(float(loss), 1)) if loss else ""

    def gate_tokens(self, batch: Batch) -> Tensor:
        """Return the longest sequence: windows with a context begin with one that is mostly padding."""
        lengths = ((batch.targets != IGNORED_TARGET) * torch.arange(1, batch.targets.shape[1] + 1)).amax(1)
        longest = int(lengths.argmax())
        return batch.inputs[longest : longest + 1, : int(lengths[longest])]


def _is_prepared(data: TextConfig, own: Path) -> bool:
    """Say whether the cache has the shards that the run began with; by its own vocabulary they would be made again."""
    if data.source in ("folder", "shards") or (data.tokenizer and not Path(data.tokenizer).is_file()):
        return False
    return has_prepared(data, data.load_tokenizer(own))


def _require_own_vocabulary(data: TextConfig, own: Path) -> None:
    # A file that is gone has moved since the run began, which has a copy.
    if data.tokenizer is None or not Path(data.tokenizer).is_file():
        return
    if data.load_tokenizer(data.tokenizer).fingerprint != data.load_tokenizer(own).fingerprint:
        hint = "omit it, for the run has a vocabulary of its own"
        raise ValueError(sentence("data.tokenizer", f"{data.tokenizer}, another vocabulary", f"that in {own}", hint))
