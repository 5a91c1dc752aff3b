"""A lowered step made ready to run: its table, and the tensors that one call brings and takes away."""

import threading
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from recurra.decoding.instructions import LINEAR
from recurra.decoding.step_graph import LoweredStep
from recurra.kernels.fork import is_forked_child


class StepProgram:
    """Runs a lowered step. Its workspace is one, so it serves one call at a time.

    Args:
        step: what to run.
    """

    def __init__(self, step: LoweredStep) -> None:
        from recurra.decoding.step_kernel import step_kernel  # Numba takes a while to load

        self._step, self._kernel, self._lock = step, step_kernel(), threading.Lock()
        moving = [tensor.untyped_storage().data_ptr() for tensor in (*step.inputs, *step.outputs)]
        numbers = {storage: number for number, storage in enumerate(moving, 1)}
        rows = [instruction.row(numbers) for instruction in step.instructions]
        self._table = np.array(rows, dtype=np.int64)
        self._bases = np.zeros(len(moving) + 2, dtype=np.int64)  # the last one is no base: `missing`
        self._likes = [(tensor.shape, tensor.stride(), tensor.dtype) for tensor in step.outputs]
        sizes = [step_row.sizes for step_row in step.instructions if step_row.opcode == LINEAR]
        self._work = max((n_in * n_out for _, n_in, n_out in sizes), default=0)

    def takes(self, inputs: Sequence[Tensor]) -> bool:
        """Tell whether `inputs` are like those of the recording, on the CPU."""
        return len(inputs) == len(self._step.inputs) and all(
            mine.dtype == like.dtype and mine.shape == like.shape and mine.device == like.device
            for mine, like in zip(inputs, self._step.inputs)
        )

    def run(self, inputs: Sequence[Tensor]) -> list[Tensor] | None:
        """Compute the outputs, new tensors, from inputs that `takes` took.

        None where another call is running, or a token is not in the vocabulary.
        """
        inputs = [tensor.resolve_conj().contiguous() for tensor in inputs]
        if not self._lock.acquire(blocking=False):
            return None
        try:
            outputs = [torch.empty_strided(*like[:2], dtype=like[2]) for like in self._likes]
            self._bases[1:-1] = [tensor.data_ptr() for tensor in (*inputs, *outputs)]
            self._bases[-1] = 0
            jobs = 1 if is_forked_child() else torch.get_num_threads()
            addresses = self._table.ctypes.data, len(self._table), self._bases.ctypes.data
            missing = addresses[2] + 8 * (len(self._bases) - 1)
            self._kernel(*addresses, missing, jobs, jobs=jobs, work=self._work)
            return None if self._bases[-1] else outputs
        finally:
            self._lock.release()
