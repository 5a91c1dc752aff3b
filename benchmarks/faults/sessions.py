"""The server's sessions file, damaged: every session is read as it was, or is named, or the file is refused."""

import sqlite3
from pathlib import Path
from typing import Any

import torch

from benchmarks.faults.binary_mutants import DAMAGES
from benchmarks.faults.outcomes import Kind, same
from recurra.models.language_model import LanguageModel, LanguageModelConfig
from recurra.serve._store import SessionRecord, SessionStore, TranscriptPart, pack, read, unpack, write
from recurra.state import tensors

OWNER, NAMES = "key", ("mine", "other", "third")


def session_kinds() -> dict[str, Kind]:
    """The sessions file as a kind."""
    return {"sessions file": Kind("sessions.sqlite", _write, _read, DAMAGES)}


def _model() -> LanguageModel:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LanguageModel(LanguageModelConfig(11, None, 2, 16, 16)).eval()


def _sessions() -> dict[str, tuple[SessionRecord, TranscriptPart]]:
    made, model = {}, _model()
    for number, name in enumerate(NAMES):
        tokens = torch.arange(40 + number, dtype=torch.int32) % 11
        with torch.inference_mode():
            _, state = model(tokens.long()[None])
        part = TranscriptPart(0, tokens.numpy().tobytes(), bytes(4 * len(tokens)), bytes(len(tokens)))
        recent = part.tokens[-16:]
        made[name] = SessionRecord(OWNER, name, "model", 1.0, 2.0, len(tokens), 0, recent, pack(state)), part
    return made


def _write(path: Path) -> None:
    store = SessionStore(path)
    for record, part in _sessions().values():
        store.submit(write, record, part).result()
    store.close()


def _read(path: Path) -> dict[str, Any]:
    """Read all sessions; raise ValueError where some are named as damaged and all others are as they were."""
    for ending in ("-wal", "-shm"):  # of the mutant before
        path.with_name(path.name + ending).unlink(missing_ok=True)
    store, model, found, damaged = SessionStore(path), _model(), {}, []
    try:
        for name in NAMES:
            try:
                session = store.submit(read, OWNER, name).result()
                found[name] = session and (*session[0][:-1], *session[1], *tensors(unpack(session[0].state, model)))
            except (ValueError, sqlite3.DatabaseError) as error:
                damaged.append(f"session {name} of {path}: {error}")
    finally:
        store.close()
    if damaged and all(same(found[name], _expected(model)[name]) for name in found):
        raise ValueError("; ".join(damaged))
    return found


def _expected(model: LanguageModel) -> dict[str, Any]:
    return {
        name: (*record[:-1], part, *tensors(unpack(record.state, model)))
        for name, (record, part) in _sessions().items()
    }
