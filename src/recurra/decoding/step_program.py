"""A lowered step made ready to run: its table, and the tensors that each call brings and takes away."""

import threading
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from recurra.decoding.instructions import LINEAR
from recurra.decoding.step_graph import LoweredStep
from recurra.decoding.step_inputs import form_of, have_forms
from recurra.kernels.fork import is_forked_child


class StepProgram:
    """Runs a lowered step. It has one workspace, so it serves one call at a time.

    Args:
        step: what to run.
    """

    def __init__(self, step: LoweredStep) -> None:
        from recurra.decoding.matvec_kernels import multiply_share, room_bytes  # Numba is slow to load
        from recurra.decoding.step_kernel import run_share, step_kernel

        self._kernel, self._lock = step_kernel(), threading.Lock()
        self._calls = run_share.address, multiply_share.address
        moving = [tensor.untyped_storage().data_ptr() for tensor in (*step.inputs, *step.outputs)]
        numbers = {storage: number for number, storage in enumerate(moving, 1)}
        rows = [instruction.row(numbers) for instruction in step.instructions]
        self._kept = [tensor for tensor in step.kept if tensor.untyped_storage().data_ptr() not in numbers]
        self._table = np.array(rows, dtype=np.int64)
        self._bases = np.zeros(len(moving) + 2, dtype=np.int64)  # the last one is no base: `missing`
        self._forms = [form_of(tensor) for tensor in step.inputs]
        self._is_empty = [tensor.numel() == 0 for tensor in step.inputs]
        self._likes = [(tensor.shape, tensor.stride(), tensor.dtype) for tensor in step.outputs]
        sizes = [step_row.sizes for step_row in step.instructions if step_row.opcode == LINEAR]
        self._work = max((n_in * n_out for _, n_in, n_out in sizes), default=0)
        most, widest = (max((size[at] for size in sizes), default=1) for at in (0, 1))
        self._room_size = room_bytes(most, widest)
        self._room = torch.zeros(0, dtype=torch.float32, device="cpu")

    def run(self, inputs: Sequence[Tensor]) -> list[Tensor] | None:
        """Compute the outputs, which are new tensors.

        Returns:
            None if an input is not like that of the recording (its form, see `step_inputs`) or has no memory that could
            be read, if another call is running, or if a token is not in the vocabulary.
        """
        if not have_forms(inputs, self._forms):
            return None
        inputs = [tensor.resolve_conj().resolve_neg().contiguous() for tensor in inputs]
        places = [tensor.data_ptr() for tensor in inputs]
        if not all(place or is_empty for place, is_empty in zip(places, self._is_empty)):
            return None  # zeros, or a tensor inside a function transform, whose numbers are nowhere yet
        if not self._lock.acquire(blocking=False):
            return None
        try:
            outputs = [torch.empty_strided(*like[:2], dtype=like[2], device="cpu") for like in self._likes]
            self._bases[1:-1] = [*places, *(tensor.data_ptr() for tensor in outputs)]
            self._bases[-1] = 0
            jobs = 1 if is_forked_child() else torch.get_num_threads()
            if len(self._room) < jobs * self._room_size // 4:
                self._room = self._room.new_zeros(jobs * self._room_size // 4)
            addresses = self._table.ctypes.data, len(self._table), self._bases.ctypes.data
            room = self._room.data_ptr(), self._room_size
            missing = addresses[2] + 8 * (len(self._bases) - 1)
            self._kernel(*self._calls, *addresses, missing, *room, jobs, jobs=jobs, work=self._work)
            return None if self._bases[-1] else outputs
        finally:
            self._lock.release()
