"""Events and sessions as JSON."""

import math
from typing import Any

from recurra.serving.served_model import ServedModel
from recurra.serving.sessions import Session
from recurra.serving.turns import EndEvent, Share, TokenEvent


def number(value: float | None) -> float | None:
    """A log-probability that JSON can hold: rounded, None for NaN, and -9999 for minus infinity, as OpenAI has it."""
    if value is None or math.isnan(value):
        return None
    return round(value, 5) if math.isfinite(value) else -9999.0


def token_json(model: ServedModel, event: TokenEvent, position: int) -> dict[str, Any]:
    """A token of a session; `position` is the number of tokens up to it, itself included."""
    body: dict[str, Any] = {
        "position": position,
        "id": event.id,
        "text": event.text,
        "from": "read" if event.was_read else "written",
        "logprob": number(event.logprob),
    }
    if event.alternatives:
        body["alternatives"] = [share_json(model, share) for share in event.alternatives]
    if event.answers:
        body["answers"] = [share_json(model, share) for share in event.answers]
    if event.gates is not None:
        body["gates"] = event.gates
    return body


def share_json(model: ServedModel, share: Share) -> dict[str, Any]:
    """One of the likeliest outputs."""
    text = model.text_of(share.id) if model.predicts_tokens else str(share.id)
    return {"id": share.id, "text": text, "logprob": number(share.logprob)}


def session_json(session: Session) -> dict[str, Any]:
    """A session as its owner sees it."""
    return {
        "id": session.name,
        "object": "session",
        "model": session.model.name,
        "created": int(session.created),
        "used": int(session.used),
        "position": session.place.n_tokens,
        "state_bytes": session.model.state_bytes,
        "cache_bytes": session.model.cache_bytes_per_token * session.place.n_tokens,
    }


def end_json(end: EndEvent) -> dict[str, Any]:
    """The end of a turn."""
    body: dict[str, Any] = {"finish_reason": end.reason, "position": end.place.n_tokens, "text": end.text}
    if end.message:
        body["message"] = end.message
    return body
