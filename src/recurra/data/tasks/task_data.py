"""The tasks as data sets: state tracking, associative recall and induction heads."""

from abc import ABCMeta, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, NamedTuple

from recurra.checks import fields_of, require, require_choice, require_whole_number
from recurra.data.batches import SPLITS, Split
from recurra.data.order import require_rank
from recurra.data.tasks.arithmetic import EQUALS, MODULUS, bracketed_arithmetic, modular_arithmetic, parity
from recurra.data.tasks.drawn import PACES, Draw, DrawnSource, Lengths, LevelledDrawnSource
from recurra.data.tasks.group_words import GROUPS, group_words, multiplication_table
from recurra.data.tasks.recall import associative_recall, induction


class Task(NamedTuple):
    """How to draw the sequences of a task, and the numbers of its tokens, of its classes, and of those that answer."""

    draw: Draw
    vocab_size: int
    output_size: int
    n_answers: int
    """Classes that are answers, all equally likely."""


STATE_TRACKING: Mapping[str, Task] = {
    "parity": Task(parity, 2, 2, 2),
    "modular-arithmetic": Task(modular_arithmetic, EQUALS + 1, MODULUS, MODULUS),
    "bracketed-arithmetic": Task(bracketed_arithmetic, EQUALS + 1, MODULUS, MODULUS),
    **{
        f"words-{group}": Task(partial(group_words, group=group), *[len(multiplication_table(group))] * 3)
        for group in GROUPS
    },
}


@dataclass(frozen=True, kw_only=True)
class TaskConfig(metaclass=ABCMeta):  # no base ABC: recipes' help lists keys where all bases are dataclasses
    """What all tasks have in common: sequences are drawn, so an epoch is a number of batches."""

    shortest: ClassVar[int] = 1
    """The least length that the task can have."""
    min_length: int
    """Shortest sequence in training, in tokens."""
    max_length: int
    """Longest sequence in training, at its start."""
    final_length: int | None = None
    """Longest sequence once the curriculum has ended; null: data.max_length throughout."""
    growth_epochs: int = 0
    """Epochs in which the longest length grows from data.max_length to data.final_length, a little with every step."""
    hold_epochs: int = 0
    """Epochs before the longest length begins to grow."""
    growth: str = "linear"
    """linear: by the same number of tokens in every epoch; geometric: by the same factor, so that more of the training
    goes to short sequences, which cost less and are learned first."""
    growth_loss: float | None = None
    """Let the longest length take the next of its data.growth_epochs steps only after an epoch whose mean training
    loss, in nats per target, is below this; null: one step in each epoch, whatever has been learned."""
    eval_min_length: int
    """Shortest sequence in evaluation."""
    eval_max_length: int
    """Longest sequence in evaluation."""
    steps_per_epoch: int = 500
    """Batches that make an epoch."""
    eval_steps: int = 16
    """Batches of whole sequences in an evaluation, on validation and on test, each always the same."""
    batch_size: int = 128
    """Sequences in a training step, over all ranks together; all have one length."""
    eval_batch_size: int = 128
    """Sequences in an evaluation step, over all ranks together."""
    eval_piece: int | None = None
    """Tokens of each sequence that an evaluation step reads, carrying the state to the next step: the memory that a
    long sequence takes is that of one piece. Null: whole sequences. With it, all have data.eval_max_length."""
    seed: int = 0
    """Seed of the sequences."""

    def __post_init__(self) -> None:
        require_whole_number(self.shortest, **fields_of(self, "data", "min_length", "eval_min_length"))
        sizes = ("steps_per_epoch", "eval_steps", "batch_size", "eval_batch_size")
        require_whole_number(1, **fields_of(self, "data", *sizes))
        require_whole_number(0, **fields_of(self, "data", "growth_epochs", "hold_epochs", "seed"))
        require_whole_number(1, **fields_of(self, "data", "eval_piece"))
        require_whole_number(self.min_length, **fields_of(self, "data", "max_length"))
        require_whole_number(self.max_length, **fields_of(self, "data", "final_length"))
        require_whole_number(self.eval_min_length, **fields_of(self, "data", "eval_max_length"))
        grows = self.final_length is not None
        expected = "at least 1 with data.final_length" if grows else "0 without data.final_length"
        require(grows == (self.growth_epochs > 0), "data.growth_epochs", self.growth_epochs, expected)
        require(grows or not self.hold_epochs, "data.hold_epochs", self.hold_epochs, "0 without data.final_length")
        require_choice(PACES, **fields_of(self, "data", "growth"))
        require(grows or self.growth == "linear", "data.growth", self.growth, "linear without data.final_length")
        self._require_growth_loss(grows)
        one_length = self.eval_piece is None or self.eval_min_length == self.eval_max_length
        expected = f"null, or data.eval_min_length = {self.eval_max_length}"
        require(one_length, "data.eval_piece", self.eval_piece, expected)

    def _require_growth_loss(self, grows: bool) -> None:
        if (loss := self.growth_loss) is None:
            return
        require(loss > 0, "data.growth_loss", loss, "a positive number or null")
        require(grows, "data.growth_loss", loss, "null without data.final_length")
        require(not self.hold_epochs, "data.hold_epochs", self.hold_epochs, "0 with data.growth_loss")

    @abstractmethod
    def make_task(self) -> Task:
        """Return the task."""

    def build(self, *, rank: int = 0, world_size: int = 1) -> "TaskData":
        """Make the data set; nothing is drawn yet. Raises ValueError if `world_size` does not divide `batch_size`."""
        return TaskData(self, rank=rank, world_size=world_size)


@dataclass(frozen=True, kw_only=True)
class StateTrackingConfig(TaskConfig):
    """Parity, modular arithmetic and word problems, with a curriculum of lengths and longer sequences in the test.

    The lengths are those of Grazzi et al., "Unlocking state-tracking in linear RNNs through negative eigenvalues".
    """

    shortest: ClassVar[int] = 2

    task: str = "parity"
    """One of `STATE_TRACKING`."""
    min_length: int = 3
    max_length: int = 40
    eval_min_length: int = 40
    eval_max_length: int = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choice(STATE_TRACKING, **{"data.task": self.task})

    def make_task(self) -> Task:
        """Return the task."""
        return STATE_TRACKING[self.task]


@dataclass(frozen=True, kw_only=True)
class RecallConfig(TaskConfig):
    """Multi-query associative recall, in the sizes of Arora et al., "Zoology" (2024)."""

    shortest: ClassVar[int] = 4

    n_pairs: int = 4
    """Pairs of a key and its value in each sequence."""
    vocabulary: int = 8192
    """Tokens: half of them for keys, half for values."""
    random_filler: bool = True
    """Whether the places between pairs and queries hold random tokens; false: token 0, as in the paper's figure 2."""
    min_length: int = 64
    max_length: int = 64
    eval_min_length: int = 64
    eval_max_length: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        require_whole_number(1, **fields_of(self, "data", "n_pairs"))
        require_whole_number(4, **fields_of(self, "data", "vocabulary"))
        for kind in ("", "eval_"):
            low, high = getattr(self, f"{kind}min_length"), getattr(self, f"{kind}max_length")
            require(
                low == high and low % 2 == 0, f"data.{kind}max_length", high, f"data.{kind}min_length, an even number"
            )
            most = f"at most {low // 4}, a quarter of data.{kind}min_length"
            require(4 * self.n_pairs <= low, "data.n_pairs", self.n_pairs, most)
        fits = self.n_pairs < self.vocabulary // 2  # the keys; one of them is the token between pairs
        require(fits, "data.n_pairs", self.n_pairs, "fewer than half of data.vocabulary")
        require(self.final_length is None, "data.final_length", self.final_length, "null: recall has one length")

    def make_task(self) -> Task:
        """Return the task."""
        draw = partial(
            associative_recall, n_pairs=self.n_pairs, vocab_size=self.vocabulary, random_filler=self.random_filler
        )
        return Task(draw, self.vocabulary, self.vocabulary, self.vocabulary - self.vocabulary // 2)


@dataclass(frozen=True, kw_only=True)
class InductionConfig(TaskConfig):
    """Induction heads, in the sizes of Gu and Dao, "Mamba" (2023)."""

    shortest: ClassVar[int] = 3

    vocabulary: int = 16
    """Ordinary tokens; the special one comes besides."""
    min_length: int = 256
    max_length: int = 256
    eval_min_length: int = 256
    eval_max_length: int = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        require_whole_number(1, **fields_of(self, "data", "vocabulary"))

    def make_task(self) -> Task:
        """Return the task."""
        n_tokens = self.vocabulary + 1
        return Task(partial(induction, vocab_size=self.vocabulary), n_tokens, n_tokens, self.vocabulary)


class TaskData:
    """The sequences of a `TaskConfig`."""

    def __init__(self, config: TaskConfig, *, rank: int = 0, world_size: int = 1) -> None:
        require_rank(rank, world_size, config.batch_size)
        self.config, self.rank, self.world_size = config, rank, world_size
        self._draw, self.vocab_size, self.output_size, self.n_answers = config.make_task()

    def source(self, split: Split) -> DrawnSource:
        """Return the batches of a split: in training by the curriculum, in evaluation the same ones every time."""
        require_choice(SPLITS, split=split)
        config, training = self.config, split == "train"
        final = config.max_length if config.final_length is None else config.final_length
        pace, hold = config.growth, config.hold_epochs
        growing = Lengths(config.min_length, config.max_length, final, config.growth_epochs, pace, hold)
        fixed = Lengths(config.eval_min_length, config.eval_max_length, config.eval_max_length, 0)
        kind: Callable[..., DrawnSource] = DrawnSource
        if training and config.growth_loss is not None:
            kind = partial(LevelledDrawnSource, level_loss=config.growth_loss)
        return kind(
            self._draw,
            growing if training else fixed,
            split=split,
            n_batches=config.steps_per_epoch if training else config.eval_steps,
            batch_size=config.batch_size if training else config.eval_batch_size,
            seed=config.seed,
            piece=None if training else config.eval_piece,
            rank=self.rank,
            world_size=self.world_size,
        )
