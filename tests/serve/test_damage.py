"""Damaged sessions files and full disks: one sentence, never another state, and the other sessions go on."""

import contextlib
import errno
import itertools
import random
import re
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from recurra.serve import _store as store
from recurra.serve._app import create_app
from recurra.serve._http import ServeSettings
from recurra.serve._service import Service
from recurra.serve._store import SessionStore

NAMES = ("mine", "other")


@contextlib.contextmanager
def serving(models, file: Path | None) -> Iterator[TestClient]:
    """The application without a socket."""
    service = Service(models[:1], ServeSettings(sessions_file=file, prefix_cache_bytes=0), threads=1)
    with TestClient(create_app(service), base_url="http://127.0.0.1") as client:
        yield client


@pytest.fixture(scope="module")
def written(models, tmp_path_factory) -> dict[str, bytes]:
    """The bytes of a sessions file with two sessions, and of one whose server was killed and left its log."""
    file = tmp_path_factory.mktemp("written") / "s"
    with serving(models, file) as client:
        for name in NAMES:
            assert client.post("/v1/sessions", json={"name": name}).status_code == 201
            for text in ("once upon a time ", "there was"):
                assert client.post(f"/v1/sessions/{name}/feed", json={"text": text}).status_code == 200
        log = file.with_name("s-wal").read_bytes()
    return {"s": file.read_bytes(), "s-wal": log}


@pytest.fixture
def file(written, tmp_path) -> Path:
    (tmp_path / "s").write_bytes(written["s"])
    return tmp_path / "s"


def edit(file: Path, *statements: str) -> None:
    with contextlib.closing(sqlite3.connect(file, isolation_level=None)) as database:
        for statement in statements:
            database.execute(statement)


def edit_unchecked(file: Path, statement: str) -> None:
    """Edit a database whose tables do not check their values meanwhile."""
    with contextlib.closing(sqlite3.connect(file)) as database:
        tables = database.execute("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL").fetchall()
    replace = "UPDATE sqlite_master SET sql = '{}' WHERE name = '{}'"
    unchecked = [(name, re.sub(r" STRICT,?| NOT NULL", "", sql)) for name, sql in tables]
    for sources, edits in ((unchecked, [statement]), (tables, [])):
        edit(file, "PRAGMA writable_schema = ON", *(replace.format(sql, name) for name, sql in sources))
        edit(file, "PRAGMA ignore_check_constraints = ON", *edits)


EDITS = {
    "position as text": "UPDATE sessions SET position = 'many' WHERE name = 'mine'",
    "position as a blob": "UPDATE sessions SET position = x'00ff' WHERE name = 'mine'",
    "position NULL": "UPDATE sessions SET position = NULL WHERE name = 'mine'",
    "position 9e18": "UPDATE sessions SET position = 9e18 WHERE name = 'mine'",
    "position negative": "UPDATE sessions SET position = -1 WHERE name = 'mine'",
    "position of another token": "UPDATE sessions SET position = position - 1 WHERE name = 'mine'",
    "created infinite": "UPDATE sessions SET created = 9e999 WHERE name = 'mine'",
    "used infinitely long ago": "UPDATE sessions SET used = -9e999 WHERE name = 'mine'",
    "used as text": "UPDATE sessions SET used = 'today' WHERE name = 'mine'",
    "used NULL": "UPDATE sessions SET used = NULL WHERE name = 'mine'",
    "model of nothing": "UPDATE sessions SET model = 7 WHERE name = 'mine'",
    "model NULL": "UPDATE sessions SET model = NULL WHERE name = 'mine'",
    "recent garbage": "UPDATE sessions SET recent = x'0102030405' WHERE name = 'mine'",
    "recent as text": "UPDATE sessions SET recent = 'text' WHERE name = 'mine'",
    "recent huge tokens": "UPDATE sessions SET recent = x'ffffff7f' WHERE name = 'mine'",
    "state garbage": "UPDATE sessions SET state = randomblob(length(state)) WHERE name = 'mine'",
    "state empty": "UPDATE sessions SET state = x'' WHERE name = 'mine'",
    "state NULL": "UPDATE sessions SET state = NULL WHERE name = 'mine'",
    "state as text": "UPDATE sessions SET state = 'text' WHERE name = 'mine'",
    "tokens garbage": "UPDATE transcripts SET tokens = x'010203' WHERE session = 1",
    "tokens huge": "UPDATE transcripts SET tokens = zeroblob(length(tokens)) WHERE session = 1",
    "logprobs too few": "UPDATE transcripts SET logprobs = x'' WHERE session = 1",
    "origins garbage": "UPDATE transcripts SET origins = randomblob(length(origins)) WHERE session = 1",
    "start 9e18": "UPDATE transcripts SET start = 9e18 WHERE session = 1 AND start = 0",
    "transcript without its beginning": "DELETE FROM transcripts WHERE session = 1 AND start = 0",
    "transcript without its end": "DELETE FROM transcripts WHERE session = 1 AND start > 0",
    "the transcript of another session": "UPDATE transcripts AS mine SET (digest, tokens) = (SELECT "
    "digest, tokens FROM transcripts AS other WHERE session = 2 AND other.start = mine.start) WHERE session = 1",
    "no transcript": "DELETE FROM transcripts WHERE session = 1",
    "the state of another session": "UPDATE sessions SET state = (SELECT state FROM sessions WHERE name = 'other'), "
    "digest = (SELECT digest FROM sessions WHERE name = 'other') WHERE name = 'mine'",
}


@pytest.mark.parametrize("statement", EDITS.values(), ids=EDITS)
def test_an_edited_session_is_named_and_the_others_live_on(models, file, statement):
    edit_unchecked(file, statement)
    with serving(models, file) as client:
        listed = client.get("/v1/sessions")
        assert [one["id"] for one in listed.json()["data"]] == list(NAMES)
        for path, body in (("feed", {"text": "x"}), ("generate", {}), ("fork", {}), ("rewind", {"position": 0})):
            answer = client.post(f"/v1/sessions/mine/{path}", json=body)
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (410, "session_damaged")
            assert re.fullmatch(r"session 'mine' is damaged \(.+\); delete it.*", error["message"])
        assert client.post("/v1/sessions", json={"name": "mine"}).json()["error"]["code"] == "session_exists"
        assert client.delete("/v1/sessions/mine").status_code == 200
        assert client.post("/v1/sessions", json={"name": "mine"}).status_code == 201
        for path, body in (("feed", {"text": "x"}), ("fork", {}), ("rewind", {"position": 3})):
            assert client.post(f"/v1/sessions/other/{path}", json=body).is_success


def test_a_list_names_sessions_whatever_their_values_are(models, file):
    values = ("x'ff'", "CAST(x'ff' AS TEXT)", "'text'", "-9e999", "NULL")
    cases = [*itertools.product(("model", "created", "used", "position", "name"), values)][:-1]  # a name is not NULL
    copied = "digest, owner, 'a' || hex(randomblob(8)), model, created, used, position, first, recent, state"
    for column, value in cases:
        edit(file, f"INSERT INTO sessions SELECT NULL, {copied} FROM sessions WHERE name = 'mine'")
        edit_unchecked(
            file, f"UPDATE sessions SET {column} = {value} WHERE number = (SELECT max(number) FROM sessions)"
        )
    with serving(models, file) as client:
        listed = client.get("/v1/sessions").json()["data"]
    assert len(listed) == len(NAMES) + len(cases)
    assert [one["position"] for one in listed].count(None) == 15


def zeros(content: bytes, start: int, n: int) -> bytes:
    return content[:start] + bytes(n) + content[start + n :]


def page(number: int) -> int:
    return 4096 * number


FILES = {
    "cut in half": lambda b: b[: len(b) // 2],
    "cut within the first page": lambda b: b[:1000],
    "cut within the header": lambda b: b[:50],
    "a page short": lambda b: b[:-4096],
    "no magic": lambda b: zeros(b, 0, 16),
    "header of zeros": lambda b: zeros(b, 0, 100),
    "page size of 3": lambda b: b[:16] + b"\0\3" + b[18:],
    "another encoding": lambda b: b[:59] + b"\2" + b[60:],
    "first page of zeros": lambda b: zeros(b, 100, 3996),
    "a table of zeros": lambda b: zeros(b, page(1), 4096),
    "an index of zeros": lambda b: zeros(b, page(2), 4096),
    "random pages": lambda b: b[: page(1)] + random.Random(0).randbytes(len(b) - page(1)),
    "text": lambda b: b"no database at all, but long enough to be looked at" * 100,
    "schema of another program": "CREATE TABLE x (y)",
    "a trigger": "CREATE TRIGGER t BEFORE UPDATE ON sessions BEGIN SELECT raise(ABORT, 'no'); END",
    "a column renamed": "ALTER TABLE sessions RENAME COLUMN state TO others",
    "a table missing": "DROP TABLE transcripts",
    "another application": "PRAGMA application_id = 7",
}


@pytest.mark.parametrize("damage", FILES.values(), ids=FILES)
def test_a_damaged_file_is_refused_in_a_sentence_and_left_as_it_is(written, file, damage):
    if isinstance(damage, str):
        edit(file, damage)
    else:
        file.write_bytes(damage(written["s"]))
    before = file.read_bytes()
    with pytest.raises(ValueError, match=r"^sessions file is .*/s, which .*; expected .*: move it .*away") as refused:
        SessionStore(file)
    assert "\n" not in str(refused.value)
    assert file.read_bytes() == before


def test_the_log_of_a_file_that_is_refused_stays_beside_it(file, tmp_path):
    """SQLite writes it into the file, and deletes it, when the last connection that may write is closed."""
    (tmp_path / "copy").mkdir()
    with contextlib.closing(sqlite3.connect(file, isolation_level=None)) as database:
        database.execute("CREATE TABLE x (y)")
        before = {name: file.with_name(name).read_bytes() for name in ("s", "s-wal")}
    for name, content in before.items():
        (tmp_path / "copy" / name).write_bytes(content)
    with pytest.raises(ValueError, match="which another program or version wrote"):
        SessionStore(tmp_path / "copy" / "s")
    assert {name: (tmp_path / "copy" / name).read_bytes() for name in before} == before


def test_a_log_without_its_file_is_not_thrown_away(written, tmp_path):
    (tmp_path / "s-wal").write_bytes(written["s-wal"])
    with pytest.raises(ValueError, match=r"^sessions file is .*, which is missing beside its log .*s-wal; expected"):
        SessionStore(tmp_path / "s")
    assert (tmp_path / "s-wal").read_bytes() == written["s-wal"]


def read_all(file: Path) -> dict[str, object]:
    """Read both sessions: what is stored, "damaged", or None if there is none."""
    kept = SessionStore(file)
    found: dict[str, object] = {}
    for name in NAMES:
        try:
            found[name] = kept.submit(store.read, "", name).result(10)
        except (ValueError, sqlite3.DatabaseError):
            found[name] = "damaged"
    kept.close()
    return found


def flipped(content: bytes, place: int, bit: int) -> bytes:
    return content[:place] + bytes([content[place] ^ 1 << bit]) + content[place + 1 :]


def replace_state(database: sqlite3.Connection, state: bytes) -> None:
    database.execute("UPDATE sessions SET state = ? WHERE name = 'mine'", (state,))


def test_no_flipped_bit_of_a_state_is_read_as_another_state(file):
    whole, draw = read_all(file), random.Random(0)
    (record, _) = whole["mine"]
    kept = SessionStore(file)
    for _ in range(60):
        state = flipped(record.state, draw.randrange(len(record.state)), draw.randrange(8))
        kept.submit(replace_state, state).result(10)
        with pytest.raises(ValueError, match="digest"):
            kept.submit(store.read, "", "mine").result(10)
        assert kept.submit(store.read, "", "other").result(10) == whole["other"]
    kept.close()


def test_no_flipped_bit_of_the_file_changes_or_hides_a_session(file, written):
    whole, draw, outcomes = read_all(file), random.Random(0), []
    for _ in range(60):
        file.write_bytes(flipped(written["s"], draw.randrange(len(written["s"])), draw.randrange(8)))
        try:
            found = read_all(file)
        except (ValueError, OSError):
            outcomes.append("refused")
            continue
        outcomes.append("damaged" if "damaged" in found.values() else "equal")
        assert all(found[name] in ("damaged", whole[name]) for name in NAMES)
    assert set(outcomes) == {"refused", "damaged", "equal"}


@contextlib.contextmanager
def full_disk(client: TestClient) -> Iterator[list[str]]:
    """Let the database take no further page, and fill the last; yield the names of the sessions that have filled it."""

    def limit(n_pages: int) -> None:
        action = f"PRAGMA max_page_count = {n_pages}"
        client.app.state.service.store.submit(lambda database: database.execute(action).fetchall()).result(10)

    limit(1)  # as many as there are
    filling = [f"z{number}" for number in range(20)]
    answers = (client.post("/v1/sessions", json={"name": name}) for name in filling)
    n_filled = next(number for number, answer in enumerate(answers) if answer.status_code == 507)
    yield filling[:n_filled]
    limit(2**30)


def require_507(answer) -> None:
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["type"]) == (507, "disk_full", "server_error")
    assert re.search(
        r"the file system of s is /.*, which is full \(\d+ bytes are free\); expected at least \d+", error["message"]
    )


def test_a_full_disk_is_said_counted_and_changes_nothing(models, file, caplog):
    with serving(models, file) as client:
        before = {name: client.get(f"/v1/sessions/{name}/transcript").json() for name in NAMES}
        with full_disk(client) as filling:
            for path, body in (
                ("", {"name": "new"}),
                ("/mine/fork", {"name": "new"}),
                ("/mine/fork", {"name": "new", "position": 3}),
            ):
                require_507(client.post(f"/v1/sessions{path}", json=body))
            long = {"text": "a" * 5000}
            require_507(client.post("/v1/sessions/mine/feed", json=long))
            assert '"code": "disk_full"' in client.post("/v1/sessions/mine/feed", json=long | {"stream": True}).text
            assert {name: client.get(f"/v1/sessions/{name}/transcript").json() for name in NAMES} == before
            assert "recurra_disk_full_total 6.0" in client.get("/metrics").text
        assert [one["id"] for one in client.get("/v1/sessions").json()["data"]] == [*NAMES, *filling]
        assert client.post("/v1/sessions", json={"name": "new"}).status_code == 201
        assert client.post("/v1/sessions/mine/feed", json={"text": "x"}).json()["position"] == 27


@pytest.mark.parametrize(
    "error", [sqlite3.OperationalError("database or disk is full"), OSError(errno.ENOSPC, "No space left on device")]
)
def test_every_request_that_meets_a_full_disk_gets_507(models, file, monkeypatch, error):
    def fails(*_: object) -> None:
        raise error

    with serving(models, file) as client:
        with monkeypatch.context() as patch:
            patch.setattr(store, "read", fails)
            require_507(client.get("/v1/sessions/mine"))
        assert client.get("/v1/sessions/mine").status_code == 200
        for action in ("write", "delete", "infos"):
            monkeypatch.setattr(store, action, fails)
        require_507(client.post("/v1/sessions/mine/rewind", json={"position": 3}))
        require_507(client.post("/v1/sessions/mine/generate", json={"stream": False, "max_tokens": 2}))
        require_507(client.delete("/v1/sessions/mine"))
        require_507(client.get("/v1/sessions"))


def test_another_fault_of_the_file_is_said_too(models, file, monkeypatch):
    def fails(*_: object) -> None:
        raise sqlite3.OperationalError("database is locked")

    with serving(models, file) as client:
        monkeypatch.setattr(store, "write", fails)
        answer = client.post("/v1/sessions", json={})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "sessions_file_failed")
        assert answer.json()["error"]["message"] == "the sessions file cannot be used now: database is locked"


def test_a_file_that_goes_away_keeps_nothing_and_says_so(models, file):
    """SQLite would go on writing to a file without a name."""
    with serving(models, file) as client:
        away = file.rename(file.with_name("away"))
        for answer in (client.post("/v1/sessions", json={"name": "new"}), client.get("/v1/sessions")):
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "sessions_file_failed")
            assert "was removed, moved or replaced" in answer.json()["error"]["message"]
        away.rename(file)
        assert client.post("/v1/sessions", json={"name": "new"}).status_code == 201


class Full(sqlite3.Connection):
    """A disk without room for large transactions, whose whole transaction SQLite rolls back."""

    def execute(self, statement: str, *arguments):
        if statement == "COMMIT" and self.total_changes - self.before > 1:
            super().execute("ROLLBACK")
            raise sqlite3.OperationalError("database or disk is full")
        if statement == "BEGIN":
            self.before = self.total_changes
        return super().execute(statement, *arguments)


def test_what_fits_alone_does_not_fail_with_what_does_not(monkeypatch):
    """Actions share a transaction, and it failed as a whole."""
    connect = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda *words, **options: connect(*words, **options, factory=Full))
    kept = SessionStore()
    kept.submit(lambda database: database.execute("CREATE TABLE t (x)")).result(10)
    go_on = threading.Event()
    begun = kept.submit(lambda _: go_on.wait(10))
    insert = "INSERT INTO t VALUES (1)"
    small = [kept.submit(lambda database: database.execute(insert).rowcount) for _ in range(3)]
    large = kept.submit(lambda database: [database.execute(insert) for _ in range(2)])
    go_on.set()
    assert begun.result(10)
    assert [one.result(10) for one in small] == [1, 1, 1]
    with pytest.raises(OSError, match="is full; expected at least 24720 bytes"):
        large.result(10)
    assert kept.submit(lambda database: database.execute("SELECT count(*) FROM t").fetchone()).result(10) == (3,)
    kept.close()
