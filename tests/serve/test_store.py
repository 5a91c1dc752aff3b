"""What lasts of a session: the database, transcripts, and states as bytes."""

import asyncio
import math
import os
import sqlite3
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recurra.serve import _database as database_module
from recurra.serve import _store as store
from recurra.serve._database import open_database
from recurra.serve._store import READ, WRITTEN, SessionRecord, SessionStore, Transcript, TranscriptPart, pack, unpack
from recurra.state import tensors

from .conftest import language_model


def record(name: str, owner: str = "me", state: bytes = b"state") -> SessionRecord:
    return SessionRecord(owner, name, "model", 1.0, 2.0, 3, 0, b"\1\0\0\0", state)


def piece(start: int, n: int) -> TranscriptPart:
    return TranscriptPart(start, bytes(4 * n), bytes(4 * n), bytes(n))


@pytest.fixture
def kept(tmp_path):
    made = SessionStore(tmp_path / "deep" / "sessions.sqlite")
    yield made
    made.close()


def do(kept: SessionStore, action, *arguments):
    return kept.submit(action, *arguments).result(10)


def test_what_is_written_is_read_by_another_process_s_database(kept, tmp_path):
    do(kept, store.write, record("a"), piece(0, 5))
    (tmp_path / "link.sqlite").symlink_to(tmp_path / "deep" / "sessions.sqlite")
    message = rf"sessions file is .*, which process {os.getpid()} on .* has open; expected"
    for path in (tmp_path / "deep" / "sessions.sqlite", tmp_path / "link.sqlite"):
        with pytest.raises(BlockingIOError, match=message):
            SessionStore(path)
    kept.close()
    other = SessionStore(tmp_path / "deep" / "sessions.sqlite")
    assert do(other, store.read, "me", "a") == (record("a"), [piece(0, 5)])
    assert do(other, store.read, "me", "b") is None
    other.close()


def test_a_client_that_hangs_up_ends_its_wait_alone(kept):
    """The action is done all the same, and the thread goes on."""

    async def hang_up():
        waiting = asyncio.ensure_future(kept.call(store.write, record("a"), piece(0, 5)))
        await asyncio.sleep(0)
        waiting.cancel()
        with suppress(asyncio.CancelledError):
            await waiting
        return await asyncio.wait_for(kept.call(store.read, "me", "a"), 10)

    assert asyncio.run(hang_up()) == (record("a"), [piece(0, 5)])


def test_pieces_are_added_replaced_and_put_in_one(kept):
    do(kept, store.write, record("a"), piece(0, 5))
    do(kept, store.write, record("a", state=b"new"), piece(5, 2))
    assert do(kept, store.read, "me", "a") == (record("a", state=b"new"), [piece(0, 5), piece(5, 2)])
    do(kept, store.write, record("a"), piece(5, 0))
    assert do(kept, store.read, "me", "a")[1] == [piece(0, 5)]
    do(kept, store.write, record("a"), piece(2, 9), True)
    assert do(kept, store.read, "me", "a")[1] == [piece(2, 9)]


def test_a_session_goes_with_its_transcript(kept):
    for name in ("a", "b"):
        do(kept, store.write, record(name), piece(0, 5))
    assert do(kept, store.delete, "me", "a")
    assert not do(kept, store.delete, "me", "a")
    assert do(kept, lambda database: database.execute("SELECT count(*) FROM transcripts").fetchone()) == (1,)


def test_an_action_that_fails_leaves_the_others_and_nothing_of_its_own(kept):
    def fails(database):
        store.write(database, record("half"), piece(0, 1))
        raise ValueError("no")

    asked = [(store.write, record("a"), piece(0, 1)), (fails,), (store.write, record("b"), piece(0, 1))]
    futures = [kept.submit(*words) for words in asked]
    with pytest.raises(ValueError, match="no"):
        futures[1].result(10)
    assert [info.name for info in do(kept, store.infos, "me", 10)] == ["a", "b"]


def test_a_file_is_made_whole_or_not_at_all(tmp_path, monkeypatch):
    monkeypatch.setattr(database_module, "SCHEMA", f"{database_module.SCHEMA} INSERT INTO missing VALUES (1);")
    with pytest.raises(OSError, match=r"s cannot be opened: no such table: missing"):
        SessionStore(tmp_path / "s")
    database = sqlite3.connect(tmp_path / "s")
    assert database.execute("SELECT count(*) FROM sqlite_master").fetchone() == (0,)
    database.close()


def test_pipes_devices_and_folders_are_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(OSError, match="cannot be opened: it is no regular file"):
            open_database(path)


def of(tokens, most: int = 100) -> Transcript:
    made = Transcript(most)
    for number, token in enumerate(tokens):
        made.append(token, -0.5 * number if number else None, WRITTEN if number % 2 else READ)
    return made


def test_entries_have_log_probability_and_origin():
    (first, second) = of([7, 9]).entries(0, 2)
    assert (first[0], first[2]) == (7, READ)
    assert math.isnan(first[1])
    assert second == (9, -0.5, WRITTEN)


@given(st.integers(1, 60), st.integers(1, 9))
def test_the_last_tokens_are_kept(length, most):
    made = of(range(length), most)
    assert len(made) == length
    assert min(length, most) <= length - made.first < 2 * most or made.first == 0
    assert made.tokens(made.first, length) == list(range(made.first, length))
    with pytest.raises(LookupError):
        made.tokens(made.first - 1, length)


@given(st.lists(st.integers(0, 30), max_size=4), st.integers(1, 40))
def test_joined_parts_are_the_transcript(cuts, most):
    whole, parts, start = of(range(30), 100), [], 0
    for cut in [*sorted(cuts), 30]:
        part = whole.copy(cut).part(start)
        parts += [part] if part.tokens else []
        start = cut
    made = Transcript.from_parts(parts, most, 0, 30)
    assert len(made) == 30
    assert made.first == max(0, 30 - most)
    assert made.tokens(made.first, 30) == list(range(made.first, 30))
    assert made.entries(29, 30) == whole.entries(29, 30)


@pytest.mark.parametrize("mixer", ["gateloop", "rotary-attention"])
@torch.no_grad()
def test_a_state_comes_back_bit_for_bit(mixer):
    model = language_model(mixer=mixer)
    _, state = model(torch.tensor([[1, 2, 3]]))
    back = unpack(pack(state), model)
    assert all(torch.equal(*pair) for pair in zip(tensors(state), tensors(back), strict=True))
    assert torch.equal(*(model(torch.tensor([[4]]), one)[0] for one in (state, back)))


@pytest.mark.parametrize("damage", [lambda b: b[:-3], lambda b: pack(language_model(mixer="gru").initial_state(1))])
def test_bytes_of_no_state_of_the_model_are_refused(damage):
    model = language_model()
    packed = pack(model.initial_state(1))
    with pytest.raises(ValueError, match="cannot be read"):
        unpack(damage(packed), model)
