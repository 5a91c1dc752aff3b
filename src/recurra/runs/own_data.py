"""The data of a run, under the names that it has learned: its vocabulary, its classes."""

import unicodedata
from dataclasses import replace
from pathlib import Path

from recurra.checks import sentence
from recurra.data import DataSet, TextConfig
from recurra.data.text import has_prepared
from recurra.data.video import VideoData
from recurra.files.reading import read_text
from recurra.training import Experiment, RunFolder
from recurra.training.ranks import Ranks


def own_data(experiment: Experiment, folder: RunFolder, ranks: Ranks | None = None) -> DataSet:
    """Open or generate the data of a run, as one of several ranks reads them.

    A text is read with the vocabulary in the run's folder, wherever the text lies and whatever its training file
    contains: as many words in another order would fit the model, and mean something else. A folder without a
    vocabulary is an older run's; its corpus makes one anew.

    Raises:
        OSError: the data are not where the configuration says.
        ValueError: they cannot be read, `data.tokenizer` is another vocabulary than the run's, or the videos have other
            classes.
    """
    config, ranks = experiment.data, ranks or Ranks()
    if isinstance(config, TextConfig) and folder.tokenizer.exists():
        _require_own_vocabulary(config, folder.tokenizer)
        if _is_prepared(config, folder.tokenizer):
            return config.build(rank=ranks.data_rank, world_size=ranks.data_count)
        return replace(config, tokenizer=str(folder.tokenizer), bpe_vocab_size=None).build(
            rank=ranks.data_rank, world_size=ranks.data_count
        )
    data = experiment.build_data(rank=ranks.data_rank, world_size=ranks.data_count)
    if isinstance(data, VideoData) and folder.classes.exists() and tuple(data.class_names) != read_classes(folder):
        raise ValueError(sentence("data.path", "videos of other classes", f"those in {folder.classes}"))
    return data


def read_classes(folder: RunFolder) -> tuple[str, ...]:
    """Read the names of the classes in a video run's folder, in their order.

    Raises:
        OSError: it has none.
        ValueError: the file is damaged.
    """
    names = tuple(read_text(folder.classes).removesuffix("\n").split("\n"))
    if len(set(names)) < len(names) or not all(map(can_be_listed, names)):
        raise ValueError(sentence(str(folder.classes), "damaged", "the distinct names of the classes, one per line"))
    return names


def can_be_listed(name: str) -> bool:
    """Whether a class of this name can be a line of a file: it has letters, and no control characters."""
    return bool(name.strip()) and not any(unicodedata.category(letter) == "Cc" for letter in name)


def _is_prepared(config: TextConfig, own: Path) -> bool:
    """Say whether the cache has the shards that the run began with; by its own vocabulary they would be made again."""
    if config.source in ("folder", "shards") or (config.tokenizer and not Path(config.tokenizer).is_file()):
        return False
    return has_prepared(config, config.load_tokenizer(own))


def _require_own_vocabulary(config: TextConfig, own: Path) -> None:
    # A file that is gone has moved since the run began, which has a copy.
    if config.tokenizer is None or not Path(config.tokenizer).is_file():
        return
    if config.load_tokenizer(config.tokenizer).fingerprint != config.load_tokenizer(own).fingerprint:
        mend = "omit it, for the run has a vocabulary of its own"
        raise ValueError(sentence("data.tokenizer", f"{config.tokenizer}, another vocabulary", f"that in {own}", mend))
