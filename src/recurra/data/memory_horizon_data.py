"""Memory Horizon as a data set: its configuration, its three splits and the order of its batches."""

from dataclasses import dataclass, field

from jaxtyping import Int
from torch import Tensor

from recurra.checks import fields_of, require, require_choice, require_whole_number
from recurra.data.batches import IGNORED_TARGET, SPLITS, Batch, Split
from recurra.data.memory_horizon import draw_memory_horizon_tokens, memory_horizon_targets, memory_spans
from recurra.data.memory_horizon_windows import WindowSource
from recurra.data.order import require_rank
from recurra.data.sample_order import SampleOrder


@dataclass(frozen=True)
class MemoryHorizonConfig:
    """The Memory Horizon data set (GateLoop Table 2); the defaults are the paper's.

    Raises TypeError or ValueError, naming the field, for an impossible value.
    """

    sequence_length: int = 1024
    """Steps in a sequence."""
    largest_number: int = 4
    """Number tokens are 0..largest_number; the reset token is the number after them."""
    resets_per_sample: int = 3
    """Reset tokens in each sequence, at distinct random steps."""
    modulus: int = 51
    """Targets are taken modulo this number: they lie in 0..modulus-1."""
    n_samples: int = 2000
    """Sequences in total: a tenth each, rounded down, for validation and test, and the rest for training."""
    batch_size: int = 32
    """Sequences in a training step, over all ranks together."""
    eval_batch_size: int = 32
    """Sequences in an evaluation step, over all ranks together."""
    window_lengths: list[int] = field(default_factory=list)
    """Lengths of the windows that training reads in place of whole sequences at first, one phase after another."""
    window_epochs: list[int] = field(default_factory=list)
    """Epochs of each of these phases; whole sequences follow."""
    window_tokens: int = 512
    """Tokens of each sequence that a training step reads in windows."""
    seed: int = 0
    """Seed of the sequences, of the training order and of the windows' places."""

    def __post_init__(self) -> None:
        sizes = fields_of(self, "data", "sequence_length", "modulus", "batch_size", "eval_batch_size")
        require_whole_number(1, **sizes)
        require_whole_number(0, **fields_of(self, "data", "largest_number", "resets_per_sample", "seed"))
        require_whole_number(10, **fields_of(self, "data", "n_samples"))
        fits = self.resets_per_sample <= self.sequence_length
        most = f"at most data.sequence_length = {self.sequence_length}"
        require(fits, "data.resets_per_sample", self.resets_per_sample, most)
        require_whole_number(1, **fields_of(self, "data", "window_tokens"))
        usual = type(self).window_tokens
        plain = self.window_lengths or self.window_tokens == usual
        require(bool(plain), "data.window_tokens", self.window_tokens, f"{usual} without data.window_lengths")
        for number, length in enumerate(self.window_lengths):
            name = f"data.window_lengths[{number}]"
            require(
                1 <= length <= self.sequence_length, name, length, f"1 to data.sequence_length = {self.sequence_length}"
            )
        same = len(self.window_lengths) == len(self.window_epochs)
        expected = f"as many numbers as data.window_lengths, {len(self.window_lengths)}"
        require(same, "data.window_epochs", self.window_epochs, expected)
        require(
            min(self.window_epochs, default=1) >= 1, "data.window_epochs", self.window_epochs, "numbers of at least 1"
        )

    def build(self, *, rank: int = 0, world_size: int = 1) -> "MemoryHorizon":
        """Draw the sequences and compute their targets, the same on every rank.

        Raises ValueError if `world_size` does not divide `batch_size`.
        """
        return MemoryHorizon(self, rank=rank, world_size=world_size)


class MemoryHorizon:
    """The sequences of a `MemoryHorizonConfig`.

    tokens, targets: (n_samples, sequence_length) int64; training first, then validation, then test.
    reset_token: largest_number + 1.
    """

    def __init__(self, config: MemoryHorizonConfig, *, rank: int = 0, world_size: int = 1) -> None:
        require_rank(rank, world_size, config.batch_size)
        self.config = config
        self.rank = rank
        self.world_size = world_size
        self.reset_token = config.largest_number + 1
        self.vocab_size = config.largest_number + 2
        self.output_size = config.modulus
        self.tokens: Int[Tensor, "N L"] = draw_memory_horizon_tokens(
            config.n_samples,
            config.sequence_length,
            largest_number=config.largest_number,
            resets_per_sample=config.resets_per_sample,
            seed=config.seed,
        )
        self.targets: Int[Tensor, "N L"] = memory_horizon_targets(
            self.tokens, reset_token=self.reset_token, modulus=config.modulus
        )

    def places(self, split: Split) -> slice:
        """Return the place of a split in `tokens` and `targets`. Raises ValueError for an unknown split."""
        require_choice(SPLITS, split=split)
        tenth = self.config.n_samples // 10
        end_of_training = self.config.n_samples - 2 * tenth
        return {
            "train": slice(0, end_of_training),
            "valid": slice(end_of_training, end_of_training + tenth),
            "test": slice(end_of_training + tenth, self.config.n_samples),
        }[split]

    def spans(self, split: Split) -> Int[Tensor, "N L"]:
        """Return the memory span of each step of each sequence of a split (see `memory_spans`)."""
        return memory_spans(self.tokens[self.places(split)], reset_token=self.reset_token)

    def source(self, split: Split) -> "SampleSource | WindowSource":
        """Return the batches of a split: training in a new order each epoch, validation and test in a fixed order."""
        places, config = self.places(split), self.config
        training = split == "train"
        tokens, targets = self.tokens[places], self.targets[places]
        if training and config.window_lengths:
            ranks = {"rank": self.rank, "world_size": self.world_size}
            return WindowSource(
                tokens,
                targets,
                SampleOrder(len(tokens), batch_size=config.batch_size, seed=config.seed, **ranks),
                phases=list(zip(config.window_lengths, config.window_epochs)),
                window_tokens=config.window_tokens,
                reset_token=self.reset_token,
                modulus=config.modulus,
                seed=config.seed,
                **ranks,
            )
        return SampleSource(
            tokens,
            targets,
            batch_size=self.config.batch_size if training else self.config.eval_batch_size,
            seed=self.config.seed if training else None,
            rank=self.rank,
            world_size=self.world_size,
        )


class SampleSource:
    """Batches of independent sequences, each of which starts from state None, in the order of `SampleOrder`.

    tokens, targets: (N, L) int64. batch_size: sequences per step over all ranks together; the attribute of the same
    name counts those on this rank. seed: of the training order; None keeps the given order, for evaluation.
    """

    def __init__(
        self,
        tokens: Tensor,
        targets: Tensor,
        *,
        batch_size: int,
        seed: int | None,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self._tokens = tokens
        self._targets = targets
        self._order = SampleOrder(len(tokens), batch_size=batch_size, seed=seed, rank=rank, world_size=world_size)
        self.batch_size = self._order.batch_size

    def __len__(self) -> int:
        return len(self._order)

    def batch(self, epoch: int, step: int) -> Batch:
        """Return the batch of a step: (B, L) inputs and targets. Raises what `BatchSource.batch` raises."""
        places, n_counted = self._order.samples(epoch, step)
        targets = self._targets[places]
        targets[n_counted:] = IGNORED_TARGET
        return Batch(self._tokens[places], targets, continues=False)
