"""Windows of Memory Horizon's sequences for training: short ones first, then longer ones, then whole sequences."""

import numpy as np
import torch
from torch import Tensor

from recurra.data.batches import Batch
from recurra.data.memory_horizon import memory_horizon_targets
from recurra.data.order import MEMORY_HORIZON_WINDOWS, random_generator
from recurra.data.sample_order import SampleOrder


class WindowSource:
    """Training batches whose sequences are windows at random places of the samples of `SampleOrder`.

    A window is read like a sequence of its own: its targets count from its start, or from a reset in it. After the
    phases, batches are whole sequences with their own targets.

    Args:
        tokens: (N, L) int64.
        targets: (N, L) int64, of the whole sequences.
        order: which samples make up a step.
        phases: (length, epochs) of windows, one after another.
        window_tokens: how many tokens of a sample a step reads, in windows that may overlap; at least one window.
        reset_token: the token that starts a new count.
        modulus: of the targets.
        seed: of the places.
        rank: this process's number, of `world_size`.
    """

    def __init__(
        self,
        tokens: Tensor,
        targets: Tensor,
        order: SampleOrder,
        *,
        phases: list[tuple[int, int]],
        window_tokens: int,
        reset_token: int,
        modulus: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self._tokens, self._targets, self._order = tokens, targets, order
        self._phases, self._window_tokens = phases, window_tokens
        self._reset_token, self._modulus, self._seed = reset_token, modulus, seed
        self._rank, self._world_size = rank, world_size
        self.batch_size = order.batch_size

    def __len__(self) -> int:
        return len(self._order)

    def length(self, epoch: int) -> int:
        """Return the length of an epoch's sequences."""
        for length, epochs in self._phases:
            if epoch < epochs:
                return length
            epoch -= epochs
        return self._tokens.shape[1]

    def batch(self, epoch: int, step: int) -> Batch:
        """Return the batch of a step: (B, L) or (B windows, length). Raises what `BatchSource.batch` raises."""
        samples, _ = self._order.samples(epoch, step)
        length, whole = self.length(epoch), self._tokens.shape[1]
        if length == whole:
            return Batch(self._tokens[samples], self._targets[samples], continues=False)
        rows = torch.tensor(samples).repeat_interleave(max(1, self._window_tokens // length))
        random = random_generator(self._seed, MEMORY_HORIZON_WINDOWS, epoch, step, 0)
        drawn = random.integers(0, whole - length + 1, (self._world_size, len(rows)), dtype=np.int64)
        starts = torch.from_numpy(drawn[self._rank])
        windows = self._tokens[rows[:, None], starts[:, None] + torch.arange(length)]
        targets = memory_horizon_targets(windows, reset_token=self._reset_token, modulus=self._modulus)
        return Batch(windows, targets, continues=False)
