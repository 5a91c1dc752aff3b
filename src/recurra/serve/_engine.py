"""The engine: one thread that reads prompts and writes tokens for all streams, a step at a time.

It alternates between a chunk of the prompts and a step of one batch of sequences. A chunk takes about as long as a
step, so a prompt of any length delays the next token of a stream by at most one more step. It may take longer only if
other prompts of the same owner wait.
"""

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from torch import Tensor

from recurra.checks import require_at_least
from recurra.decoding.linear import MOST_VECTORS
from recurra.serve._grammar import restrict
from recurra.serve._model import ServedModel
from recurra.serve._prefixes import PrefixCache
from recurra.serve._requests import (
    SHORTEST_CHUNK,
    EndEvent,
    Event,
    Request,
    Sequence,
    TokenEvent,
    TokenLogprob,
    gates_of,
    token_logprobs,
)
from recurra.serve._scheduler import PrefillChunk, Scheduler, Turns
from recurra.state import join, map_tensors, select
from recurra.streams.sampling import choose

_LOG = logging.getLogger("recurra.serve")

_BATCH_SIZE = MOST_VECTORS
"""Maximum number of sequences of a batch: as many as one pass over the weights serves."""
_FAILED = "the model failed on this turn; the server's log says why"
_NO_TOKEN = "with these settings there is no token to choose"
_KEPT = 4096
"""Durations of each kind that are kept between two readings."""

_Deliver: TypeAlias = Callable[[dict[Request, list[Event]]], None]


@dataclass
class _Counters:
    """What the engine has done: totals since the start, and durations in seconds since they were last taken."""

    read: int = 0  # tokens read
    written: int = 0  # tokens written
    ended: int = 0  # texts that ended, of which a request may have several; a request that only reads counts as one
    failed: int = 0  # those of them that ended with an error
    first_token: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))
    """From a request's arrival to its first token."""
    step_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))  # of a step of a batch


class _SequenceBatch:
    """Sequences of one model that are written side by side, with one batched state."""

    def __init__(self, model: ServedModel) -> None:
        self.model = model
        self.sequences: list[Sequence] = []
        self._state: Any = None
        self._before: Any = None  # the state before the last step, until sequences leave after it

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def owners(self) -> set[str | None]:
        return {sequence.request.owner for sequence in self.sequences}

    def join(self, sequences: list[Sequence], states: list[Any]) -> None:
        if sequences:
            self._state = join([*([] if self._state is None else [self._state]), *states])
            self.sequences.extend(sequences)

    def step(self) -> Tensor:
        """Let every sequence read its last token; return the logits after it, (sequences, outputs)."""
        tokens = torch.tensor([[sequence.stream.recent[-1]] for sequence in self.sequences])
        logits, after = self.model.runner(tokens, self._state)
        self._state, self._before = after, self._state
        return logits[:, 0]

    def state_of(self, index: int) -> Any:
        return _state_at(self._state, index)

    def leave(self, leaving: list[int], *, undone: Collection[int] = ()) -> list[Any]:
        """Remove sequences by index; return their states, for `undone` those before the last step."""
        before, self._before = self._before, None
        if not leaving:
            return []
        before = self._state if before is None else before
        states = [_state_at(before if index in undone else self._state, index) for index in leaving]
        gone = set(leaving)
        staying = [index for index in range(len(self)) if index not in gone]
        self._state = select(self._state, torch.tensor(staying)) if staying else None
        self.sequences = [self.sequences[index] for index in staying]
        return states

    def take_over(self, other: "_SequenceBatch") -> None:
        self.join(other.sequences, [other._state])
        other.sequences, other._state = [], None


def _state_at(state: Any, index: int) -> Any:
    return map_tensors(Tensor.clone, select(state, slice(index, index + 1)))


class Engine:
    """Runs requests to any number of streams. `submit`, `cancel` and `stop` may be called from any thread."""

    def __init__(
        self,
        deliver: _Deliver,
        max_streams: int = 1024,
        max_queue: int = 1024,
        threads: int | None = None,
        prefixes: PrefixCache | None = None,
        share_of: Callable[[int], int] = int,
    ) -> None:
        if threads is not None:
            require_at_least(1, threads=threads)
        self.scheduler = Scheduler(max_streams, max_queue, prefixes, share_of)
        self.counters = _Counters()
        self._deliver, self._threads = deliver, threads
        self._batches: list[_SequenceBatch] = []
        self._turns = Turns()
        self._outbox: dict[Request, list[Event]] = {}
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._lock, self._stopping = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="recurra-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, request: Request) -> None:
        with self._lock:
            self.scheduler.add(request)
        self._wake.put(None)

    def cancel(self, request: Request) -> None:
        """End a request early; it still gets its end events."""
        request.is_cancelled = True
        self._wake.put(None)

    @property
    def is_busy(self) -> bool:
        return bool(self._batches) or not self.scheduler.is_idle

    def stop(self) -> None:
        self._stopping.set()
        self._wake.put(None)
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        if self._threads is not None:
            torch.set_num_threads(self._threads)
        with torch.inference_mode():
            while not self._stopping.is_set():
                self._wait()
                self.round()
            self._end_all()

    def _wait(self) -> None:
        while not self.is_busy and not self._stopping.is_set():
            self._wake.get()
        while not self._wake.empty():
            self._wake.get()

    def round(self) -> None:
        """Read a chunk of prompts, run a step of one batch, and deliver the events of both."""
        now = time.monotonic()
        with self._lock:
            dropped = self.scheduler.drop(lambda request: request.interruption(now))
            ready = list(self.scheduler.admit(bool(self._batches)))
            chunk = self.scheduler.next_chunk(bool(self._batches))
        for request, is_admitted in dropped:
            self._drop(request, is_admitted, request.interruption(now) or "cancelled")
        for request in ready:
            self._start_writing(request)
        if chunk is not None:
            self._read(chunk)
        if self._batches:
            # the batch of the owner whose turn it is; an owner's batches take turns, too
            next_batch = min(self._batches, key=lambda one: self._turns.last(one.owners))
            self._batches.remove(next_batch)
            self._batches.append(next_batch)
            self._turns.serve(next_batch.owners)
            self._write(next_batch)
            self._merge_batches()
        self._send()

    def _put(self, request: Request, *events: Event) -> None:
        self._outbox.setdefault(request, []).extend(events)

    def _send(self) -> None:
        if self._outbox:
            events, self._outbox = self._outbox, {}
            self._deliver(events)

    def _read(self, chunk: PrefillChunk) -> None:
        start = time.perf_counter()
        try:
            self._read_chunk(chunk)
        except Exception:  # one request must not end the server
            _LOG.exception("reading failed")
            with self._lock:
                for request in chunk.requests:
                    self.scheduler.remove(request)
            for request in chunk.requests:
                self._drop(request, True, "error", _FAILED)
            return
        with self._lock:
            self.scheduler.pace.note_chunk(chunk.n_tokens, time.perf_counter() - start)
            done = self.scheduler.complete(chunk)
        self.counters.read += chunk.n_tokens
        for request in done:
            self._start_writing(request)

    def _read_chunk(self, chunk: PrefillChunk) -> None:
        requests = chunk.requests
        states = [one.start.model_state if one.prompt_state is None else one.prompt_state for one in requests]
        tokens = [one.to_read[one.n_read : one.n_read + chunk.length] for one in requests]
        model, copies = requests[0].model, 1
        if chunk.length < SHORTEST_CHUNK and requests[0].n_read:  # products of more vectors round as in longer chunks
            copies = model.least_copies(chunk.n_tokens)
        given = torch.tensor(tokens * copies), states * copies
        is_reported = any(request.is_reported for request in requests)
        hidden, after_all = model.read(*given) if is_reported else (None, model.advance(*given))
        for index, (request, after) in enumerate(zip(requests, after_all)):
            if hidden is not None and request.is_reported:
                self._put(request, *request.prompt_report.chunk(tokens[index], hidden[index], states[index]))
            request.prompt_state = after
            n_new = request.n_read + chunk.length + 1 - len(request.start.unread)  # the last one is not read yet
            if request.checkpoint_every and 0 < n_new <= len(request.tokens):
                request.add_checkpoint(request.start.after(request.tokens[:n_new], after))

    def _start_writing(self, request: Request) -> None:
        """Let a request, which has read all but its last token, write; it ends if it only reads."""
        model_state = request.start.model_state if request.prompt_state is None else request.prompt_state
        request.prompt_state = None
        try:
            if request.is_reported:
                self._put(request, request.prompt_report.last(model_state))
            state = request.start.after(request.tokens, model_state)
            sequences = [Sequence(request, choice, state) for choice in range(len(request.configs))]
        except Exception:
            _LOG.exception("reading failed")
            self._drop(request, True, "error", _FAILED)
            return
        if not sequences:
            self._put(request, EndEvent(request.first_choice, "read", state))
            self._release(request.owner, 1, n_ended=not request.is_background)
        for sequence in sequences:
            self._batch_for(request.model).join([sequence], [model_state])

    def _batch_for(self, model: ServedModel) -> _SequenceBatch:
        open_batches = [one for one in self._batches if one.model is model and len(one) < _BATCH_SIZE]
        if not open_batches:
            open_batches = [_SequenceBatch(model)]
            self._batches.extend(open_batches)
        return max(open_batches, key=len)

    def _write(self, group: _SequenceBatch) -> None:
        now = time.monotonic()
        interrupted = {i: reason for i, one in enumerate(group.sequences) if (reason := one.request.interruption(now))}
        self._leave(group, interrupted)
        if not group.sequences:
            return
        start = time.perf_counter()
        positions = [sequence.stream.position for sequence in group.sequences]
        try:
            logits = group.step()
            failed = self._choose(group, logits)
        except Exception:
            _LOG.exception("writing failed")
            undone = [i for i, one in enumerate(group.sequences) if one.stream.position == positions[i]]
            self._leave(group, dict.fromkeys(range(len(group)), "error"), _FAILED, undone)
            return
        seconds = time.perf_counter() - start
        self.scheduler.pace.note_step(seconds)
        self.counters.step_seconds.append(seconds)
        self.counters.written += len(group) - len(failed)
        ended = {i: one.finish_reason for i, one in enumerate(group.sequences) if one.finish_reason}
        self._leave(group, ended | dict.fromkeys(failed, "error"), _NO_TOKEN, failed)

    def _choose(self, group: _SequenceBatch, logits: Tensor) -> list[int]:
        """Write a token of every sequence; return the indices of those that have none to choose."""
        now, failed = time.monotonic(), []
        logits = restrict(logits, [sequence.constraint for sequence in group.sequences])
        tokens = choose(
            logits, [sequence.generation.token_choice(sequence.stream.recent) for sequence in group.sequences]
        )
        for index, (sequence, token) in enumerate(zip(group.sequences, tokens)):
            request, details = sequence.request, sequence.request.details
            if isinstance(token, ValueError):
                _LOG.error("no token to choose: %s", token)
                failed.append(index)
                continue
            if sequence.generation.n_tokens == 0:
                self.counters.first_token.append(now - request.submitted)
            logprob, gates = None, None
            alternatives: tuple[TokenLogprob, ...] = ()
            if details.of_prediction:
                logprob, alternatives = token_logprobs(logits[index], token, details.alternatives)
            if details.gates:
                (gates,) = gates_of(request.model, [token], group.state_of(index), details.gates)
            offset = sequence.n_characters
            text = sequence.append(token)  # last of all: a token counts once it is reported
            event = TokenEvent(sequence.choice, token, text, False, logprob, alternatives, (), gates, offset)
            self._put(request, event)
            if request.checkpoint_every and sequence.stream.position % request.checkpoint_every == 0:
                request.add_checkpoint(sequence.state(group.state_of(index)))
        return failed

    def _leave(
        self, group: _SequenceBatch, reasons: dict[int, str], message: str = "", undone: Collection[int] = ()
    ) -> None:
        """End sequences of a batch, each with its reason; `message` describes errors."""
        leaving = [group.sequences[index] for index in reasons]
        states = group.leave(list(reasons), undone=undone)
        for sequence, reason, state in zip(leaving, reasons.values(), states):
            error = message if reason == "error" else ""
            end = EndEvent(sequence.choice, reason, sequence.state(state), sequence.flush(), error)
            self._put(sequence.request, end)
            self._release(sequence.request.owner, 1, reason=reason)
            if reason in ("stop", "length"):
                self._read_answer(sequence)

    def _read_answer(self, sequence: Sequence) -> None:
        """Read an answer in the background, so that what continues it finds the state that reading gives.

        The state that writing has left differs from it by rounding, and answers would depend on what is kept.
        """
        request = sequence.request
        if self.scheduler.prefixes is not None and request.takes_prefix and len(sequence.written) >= SHORTEST_CHUNK:
            tokens = [*request.tokens, *sequence.written]
            background = Request(request.model, request.start, tokens, [], owner=request.owner, is_background=True)
            with self._lock:
                self.scheduler.add_background(background)

    def _merge_batches(self) -> None:
        """Drop empty batches, and merge two of one model that fit in one."""
        self._batches = [one for one in self._batches if one.sequences]
        for one, other in pairwise(sorted(self._batches, key=len)):
            if one.model is other.model and len(one) + len(other) <= _BATCH_SIZE:
                other.take_over(one)
                self._batches.remove(one)
                return

    def _drop(self, request: Request, is_admitted: bool, reason: str, message: str = "") -> None:
        """End a request that has written nothing; its stream stays where it was."""
        request.prompt_state = None
        if self.scheduler.prefixes is not None:
            self.scheduler.prefixes.release(request)
        for choice in range(request.n_sequences):
            self._put(request, EndEvent(request.first_choice + choice, reason, request.start, message=message))
        self._release(request.owner, request.n_sequences if is_admitted else 0, request.n_sequences, reason)

    def _release(self, owner: str | None, n_streams: int, n_ended: int = 1, reason: str = "") -> None:
        with self._lock:
            self.scheduler.release(owner, n_streams)
        self.counters.ended += n_ended
        self.counters.failed += n_ended * (reason == "error")

    def _end_all(self) -> None:
        with self._lock:
            dropped = self.scheduler.drop(lambda _: True)
        for request, is_admitted in dropped:
            self._drop(request, is_admitted, "cancelled")
        for group in self._batches:
            self._leave(group, dict.fromkeys(range(len(group)), "cancelled"))
        self._batches = []
        self._send()
