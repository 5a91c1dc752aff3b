"""How threads share a compiled step: each walks through all of it and claims what nobody has claimed yet.

A step is a sequence of stages, and a stage is some parts that may run at the same time. A thread begins a stage when
all parts of the earlier ones are done. A barrier at each stage would wait until every thread has been there, which
takes milliseconds if other programs use its core; here threads only wait for parts that have begun. A thread that comes
late finds its parts done by the others, and one thread alone does all.

The threads meet in `sync_words` int64 words: the number of parts that are done, and for each thread which of its own
parts have been claimed, as the number of the stage and the next part. These numbers only grow during a step.
"""

import ctypes
import os
from functools import cache
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from recurra.ops._toolkit.launch import call, compile_inline, compile_part
from recurra.ops._toolkit.vectors import call_llvm

_LINE = 16
"""Words from one thread's to the next: two cache lines, since processors fetch pairs."""
STAGE = 2**20
"""A claim is the number of its stage times this, and the next part."""
ENDED = 2**40
"""More parts than a step has, which count as done if it has ended early."""
_PAUSES = 1_000  # so many pauses, some 40 us, before a waiting thread lets others use its core
_PATIENCE = 50  # pauses before a thread takes what the first one would do with numbers in its cache


def sync_words(threads: int) -> int:
    """How many words, all zero when a step begins, the threads meet in."""
    return _LINE * (threads + 1)


@cache
def address_of_yield() -> int:
    """Where the system's function is that lets other threads use this core."""
    function = ctypes.CDLL("kernel32").SwitchToThread if os.name == "nt" else ctypes.CDLL(None).sched_yield
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def _pointer(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    return builder.inttoptr(address, ir.IntType(64).as_pointer())


@intrinsic
def _read(typing_context: Any, address: Any) -> Any:
    """Load a word that other threads write, and see all that they wrote before it."""

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: tuple) -> ir.Value:
        return builder.load_atomic(_pointer(builder, args[0]), "seq_cst", 8)

    return types.int64(types.int64), generate


@intrinsic
def _add(typing_context: Any, address: Any, value: Any) -> Any:
    """Add to a word that other threads add to."""

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: tuple) -> ir.Value:
        return builder.atomic_rmw("add", _pointer(builder, args[0]), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate


@intrinsic
def _replace(typing_context: Any, address: Any, expected: Any, value: Any) -> Any:
    """Write a word if it is as expected, and return whether it was."""

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: tuple) -> ir.Value:
        result = builder.cmpxchg(_pointer(builder, args[0]), args[1], args[2], "seq_cst", "seq_cst")
        return builder.extract_value(result, 1)

    return types.boolean(types.int64, types.int64, types.int64), generate


@intrinsic
def _pause(typing_context: Any) -> Any:
    """Tell the processor that this thread waits for another."""

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: tuple) -> None:
        architecture = context.codegen().magic_tuple()[0].partition("-")[0]
        if architecture in ("x86_64", "i686"):
            call_llvm(builder, "x86.sse2.pause", ir.VoidType())
        elif architecture in ("aarch64", "arm64"):
            call_llvm(builder, "aarch64.hint", ir.VoidType(), ir.Constant(ir.IntType(32), 1))

    return types.void(), generate


@compile_part
def _claim_one(sync, owner, stage, parts):  # type: ignore[no-untyped-def]
    """Claim the next of a thread's parts of a stage, and return its number among these; -1 if none is left."""
    at = sync + 8 * _LINE * (owner + 1)
    while True:
        claimed = _read(at)
        number = claimed % STAGE if claimed // STAGE == stage else 0
        if claimed // STAGE > stage or number == parts:
            return -1
        if _replace(at, claimed, STAGE * stage + number + 1):
            return number


@compile_inline
def is_claimed(sync, thread, stage):  # type: ignore[no-untyped-def]
    """Claim a stage of a single part, unless another thread has; the first thread is let go first."""
    if thread:
        pauses = 0
        while pauses < _PATIENCE and _read(sync + 8 * _LINE) < STAGE * stage:
            _pause()
            pauses += 1
    return _claim_one(sync, 0, stage, 1) == 0


@compile_part
def claim(sync, thread, threads, stage, parts):  # type: ignore[no-untyped-def]
    """Claim a part of a stage of `parts` parts for each thread: one's own, then those of others; -1 if none is left."""
    for i in range(threads):
        owner = thread + i - (threads if thread + i >= threads else 0)
        number = _claim_one(sync, owner, stage, parts)
        if number >= 0:
            return owner * parts + number
    return -1


@compile_inline
def finish(sync):  # type: ignore[no-untyped-def]
    """Tell that a claimed part is done."""
    _add(sync, 1)


@compile_inline
def give_up(sync):  # type: ignore[no-untyped-def]
    """Let no thread wait any more."""
    _add(sync, ENDED)


@compile_part
def wait(sync, parts, give_way):  # type: ignore[no-untyped-def]
    """Wait until so many parts have been done since the step began; tell whether the threads go on."""
    pauses = 0
    done = _read(sync)
    while done < parts:
        if pauses < _PAUSES:
            _pause()
            pauses += 1
        else:
            call(give_way, (0,))
        done = _read(sync)
    return done < ENDED
