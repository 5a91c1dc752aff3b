"""Threads that share a step: late, absent, ahead of each other, or stopped by a token that does not exist."""

import threading
from array import array

import numpy as np
import pytest
import torch
from torch import nn

from recurra.decoding._program import StepProgram, _LoweredStep
from recurra.decoding._team import ENDED, STAGE, address_of_yield, sync_words
from recurra.decoding.linear import DecodingLinear
from recurra.decoding.memory import StepMemory

LAYERS, WIDTH, ROWS = 40, 160, 40


def program_of_layers():
    """A program of products and maps, some split and some not, that begins with a look-up."""
    torch.manual_seed(0)
    tokens, table = torch.randint(ROWS, (ROWS,)), torch.randn(ROWS, WIDTH)
    memory, x = StepMemory([tokens]), torch.empty(ROWS, WIDTH)
    memory.keep(x), memory.constant(table)
    memory.look_up(x, table, tokens)
    for _ in range(LAYERS):
        layer = DecodingLinear(nn.Linear(WIDTH, WIDTH), "int8")
        memory.constant(layer.stored), memory.constant(layer.scale), memory.constant(layer.bias)
        product, one, small = (memory.scratch(shape) for shape in (x.shape, (WIDTH,), (WIDTH,)))
        memory.linear(product, x, layer.stored, layer.scale, layer.bias)
        memory.map("copy", one, product[0])
        memory.map("tanh", small, one)
        x = memory.scratch(product.shape)
        memory.map("add", x, product, small)
    out = torch.empty(ROWS, WIDTH)
    memory.map("tanh", out, x)
    return StepProgram(_LoweredStep(memory.instructions, memory.workspace(), [tokens], [out])), tokens


class Step:
    """One step of a program, which each thread of a team is told to walk through."""

    def __init__(self, program, tokens, threads):
        self.out, self.missing = torch.full((ROWS, WIDTH), torch.nan), torch.zeros(1, dtype=torch.int64)
        self.bases = np.array([0, tokens.data_ptr(), self.out.data_ptr(), 0], dtype=np.int64)
        self.sync = np.zeros(sync_words(threads), dtype=np.int64)
        self.room = torch.full((threads * program._room_size // 4,), torch.nan)
        arguments = (
            *(program._run_share, program._table.ctypes.data, len(program._table), self.bases.ctypes.data),
            *(self.missing.data_ptr(), self.room.data_ptr(), program._room_size),
            *(self.sync.ctypes.data, address_of_yield(), threads),
        )
        self.form, pack = program._kernel._form(tuple(map(type, arguments)), arguments)
        self.words = array("q", pack(arguments))

    def walk(self, first, last):
        self.form.compiled(self.words.buffer_info()[0], first, last)


@pytest.fixture(scope="module")
def program():
    program, tokens = program_of_layers()
    step = Step(program, tokens, 1)
    step.walk(0, 1)
    assert not step.out.isnan().any()
    return program, tokens, step.out


@pytest.mark.parametrize("first", [0, 1, 2])
def test_one_thread_of_a_team_does_all_and_the_late_ones_nothing(program, first):
    program, tokens, expected = program
    step = Step(program, tokens, 3)
    step.walk(first, first + 1)
    assert torch.equal(step.out, expected)
    step.out.fill_(torch.nan)
    for late in {0, 1, 2} - {first}:
        step.walk(late, late + 1)
    assert step.out.isnan().all()


def test_a_thread_waits_for_a_part_that_another_has_begun(program):
    program, tokens, _ = program
    step = Step(program, tokens, 2)
    first_claims = step.sync[sync_words(0) :]
    first_claims[0] = STAGE + 1  # the look-up, by the first thread
    second = threading.Thread(target=step.walk, args=(1, 2))
    second.start()
    second.join(0.2)
    assert second.is_alive()
    assert step.out.isnan().all()
    step.sync[0] = ENDED
    second.join()
    assert step.out.isnan().all()


@pytest.mark.parametrize("threads", [2, 3, 5])
def test_threads_at_once(program, threads):
    """More of them than cores, so that some are late or stand still in the middle of a part."""
    program, tokens, expected = program
    for _ in range(20):
        step = Step(program, tokens, threads)
        team = [threading.Thread(target=step.walk, args=(i, i + 1)) for i in range(threads)]
        [thread.start() for thread in team], [thread.join() for thread in team]
        assert torch.equal(step.out, expected)


@pytest.mark.parametrize("first", [0, 1])
def test_a_token_that_does_not_exist_ends_all_threads(program, first):
    program, tokens, _ = program
    step = Step(program, torch.full_like(tokens, ROWS), 2)
    step.walk(first, first + 1)
    step.walk(1 - first, 2 - first)
    assert step.missing == 1
    assert step.out.isnan().all()
