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
from recurra.train._start import start_language_model
from recurra.train.evaluate import perplexity
from recurra.train.experiment import Experiment
from recurra.train.run_folder import RunFolder
from recurra.train.task import TokenTask, register_task


@register_task("text")
class TextTask(TokenTask):
    """Beside a run lies its tokenizer, which tells what the model's numbers mean wherever the text lies."""

    data = TextConfig

    def models(self) -> list[ModelEntry]:
        return list_models(DataSizes)

    def open_data(self, data: TextConfig, folder: RunFolder, *, rank: int = 0, world_size: int = 1) -> TextData:
        """Open the text, read with the vocabulary in the run's folder, whatever the training file contains now.

        The same words in another order would fit the model, and mean something else.
        """
        own = folder.tokenizer
        _require_own_vocabulary(data, own)
        if not _is_prepared(data, own):
            data = replace(data, tokenizer=str(own), bpe_vocab_size=None)
        return data.build(rank=rank, world_size=world_size)

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
        return {"kind": "text", "start": first_tokens(run.tokenizer), "before": list(start_of(run.tokenizer))}

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
