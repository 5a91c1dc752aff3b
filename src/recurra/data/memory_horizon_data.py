"""Memory Horizon as a data set: its configuration, its three splits and the order of its batches."""

from dataclasses import dataclass

from jaxtyping import Int
from torch import Tensor

from recurra.data.batches import IGNORED_TARGET, SPLITS, Batch, Split
from recurra.data.fields import require_choice, require_rank, require_whole_number
from recurra.data.memory_horizon import draw_memory_horizon_tokens, memory_horizon_targets, memory_spans
from recurra.data.rows import RowOrder

_OWNER = "MemoryHorizonConfig"


@dataclass(frozen=True)
class MemoryHorizonConfig:
    """The Memory Horizon data set (GateLoop Table 2); the defaults are the paper's.

    Raises TypeError or ValueError, naming the field, for a value that cannot be.
    """

    sequence_length: int = 1024
    """Steps in a sequence."""
    largest_number: int = 4
    """Number tokens are 0..largest_number; the reset token is the next one."""
    resets_per_sample: int = 3
    """Reset tokens in each sequence, at distinct random steps."""
    modulus: int = 51
    """Targets are taken modulo this number, so they lie in 0..modulus-1."""
    n_samples: int = 2000
    """Sequences in all; a tenth each (rounded down) for validation and test, the others for training."""
    batch_size: int = 32
    """Sequences in a training step, over all ranks together."""
    eval_batch_size: int = 32
    """Sequences in an evaluation step, over all ranks together."""
    seed: int = 0
    """Draws the sequences and the order of training."""

    def __post_init__(self) -> None:
        minimums = {
            "sequence_length": 1,
            "largest_number": 0,
            "resets_per_sample": 0,
            "modulus": 1,
            "n_samples": 10,
            "batch_size": 1,
            "eval_batch_size": 1,
            "seed": 0,
        }
        for field, minimum in minimums.items():
            require_whole_number(_OWNER, field, getattr(self, field), minimum)
        if self.resets_per_sample > self.sequence_length:
            raise ValueError(
                f"{_OWNER}.resets_per_sample must not exceed sequence_length {self.sequence_length}, "
                f"got {self.resets_per_sample}"
            )

    def build(self, *, rank: int = 0, world_size: int = 1) -> "MemoryHorizon":
        """Draw the sequences and compute their targets, the same ones on every rank.

        Raises ValueError where `world_size` does not divide `batch_size`.
        """
        return MemoryHorizon(self, rank=rank, world_size=world_size)


class MemoryHorizon:
    """The sequences of a `MemoryHorizonConfig`.

    tokens, targets: (n_samples, sequence_length) int64; training first, then validation, then test.
    reset_token: largest_number + 1.
    """

    def __init__(self, config: MemoryHorizonConfig, *, rank: int = 0, world_size: int = 1) -> None:
        require_rank(_OWNER, rank, world_size, config.batch_size)
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

    def rows(self, split: Split) -> slice:
        """The rows of `tokens` and `targets` that make a split. Raises ValueError for an unknown split."""
        require_choice(type(self).__name__, "split", split, SPLITS)
        tenth = self.config.n_samples // 10
        end_of_training = self.config.n_samples - 2 * tenth
        return {
            "train": slice(0, end_of_training),
            "valid": slice(end_of_training, end_of_training + tenth),
            "test": slice(end_of_training + tenth, self.config.n_samples),
        }[split]

    def spans(self, split: Split) -> Int[Tensor, "N L"]:
        """The memory span of every step of a split, in the order of its rows (see `memory_spans`)."""
        return memory_spans(self.tokens[self.rows(split)], reset_token=self.reset_token)

    def source(self, split: Split) -> "SampleSource":
        """The batches of a split: training in a new order each epoch, the others in their own order."""
        rows = self.rows(split)
        training = split == "train"
        return SampleSource(
            self.tokens[rows],
            self.targets[rows],
            batch_size=self.config.batch_size if training else self.config.eval_batch_size,
            seed=self.config.seed if training else None,
            rank=self.rank,
            world_size=self.world_size,
        )


class SampleSource:
    """Batches of independent sequences, each from state None, in the order of `RowOrder`: a new permutation each epoch
    with a seed (training), the order of the rows without one (evaluation).

    tokens, targets: (N, L) int64. batch_size: rows of a step over all ranks together; the attribute of that
    name counts the rows on this rank.
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
        self._order = RowOrder(len(tokens), batch_size=batch_size, seed=seed, rank=rank, world_size=world_size)
        self.batch_size = self._order.rows_here

    def __len__(self) -> int:
        return len(self._order)

    def batch(self, epoch: int, step: int) -> Batch:
        """The batch of a step: (rows, L) inputs and targets. Raises as `BatchSource.batch` says."""
        places, n_counted = self._order.rows(epoch, step)
        targets = self._targets[places]
        targets[n_counted:] = IGNORED_TARGET
        return Batch(self._tokens[places], targets, continues=False)
