"""/v1/sessions: streams by name, which last."""

import json
import secrets
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Query, Request, Response
from sse_starlette import EventSourceResponse

from recurra.generation.generating import GenerationConfig
from recurra.serving.bodies import (
    NAME,
    FeedBody,
    ForkBody,
    GenerateBody,
    LabelBody,
    OpenBody,
    RewindBody,
    TellBody,
    allowed_tokens,
    encoded,
    require_short,
    sampling_of,
    stops_of,
)
from recurra.serving.http import ApiError, number, turn_failed
from recurra.serving.model import Place, ServedModel
from recurra.serving.requests import EndEvent, Event, Share, TokenEvent, Turn, Wanted
from recurra.serving.service import Caller, Service, caller
from recurra.serving.sessions import EVERY, Session
from recurra.serving.streaming import begun, event_stream, message, unless_gone, whole


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


router = APIRouter(prefix="/v1/sessions", tags=["sessions"])

Asked = Annotated[Caller, Depends(caller)]
Named = Annotated[str, Path(pattern=NAME)]


@router.post("", status_code=201)
async def open_session(body: OpenBody, asked: Asked) -> dict[str, Any]:
    """Open a session."""
    service = asked.service
    return session_json(await service.sessions.open(asked.owner, service.model(body.model), body.name))


@router.get("")
async def list_sessions(
    asked: Asked, limit: Annotated[int, Query(ge=1, le=1000)] = 100, after: Annotated[str, Query(max_length=64)] = ""
) -> dict[str, Any]:
    """List sessions by name, from the one after `after` on."""
    lines = await asked.service.sessions.lines(asked.owner, limit + 1, after)  # one more tells whether there are more
    data = [
        {
            "id": line.name,
            "object": "session",
            "model": model,
            "created": int(line.created),
            "used": int(line.used),
            "position": line.n_tokens,
        }
        for line, model in lines[:limit]
    ]
    return {"object": "list", "data": data, "has_more": len(lines) > limit}


@router.get("/{name}")
async def show_session(name: Named, asked: Asked) -> dict[str, Any]:
    """Show a session."""
    return session_json(await _session(asked, name))


@router.delete("/{name}")
async def close_session(name: Named, asked: Asked) -> dict[str, Any]:
    """Close a session: it is deleted, with its saved copies."""
    await asked.service.sessions.close(asked.owner, name)
    return {"id": name, "object": "session", "deleted": True}


@router.get("/{name}/transcript")
async def transcript(
    name: Named,
    asked: Asked,
    start: Annotated[int, Query(ge=0, lt=2**53)] = 0,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
) -> dict[str, Any]:
    """Give tokens of the transcript, from position `start` on, or from the oldest that is kept."""
    session = await _session(asked, name)
    first, end = max(start, session.transcript.first), len(session.transcript)
    entries = session.transcript.entries(first, min(end, first + limit)) if first < end else []
    before = session.transcript.tokens(max(session.transcript.first, first - 16), first) if entries else []
    text = session.model.pieces(before)
    tokens = [
        {
            "position": first + place + 1,
            "id": token,
            "text": text(token),
            "from": "written" if origin else "read",
            "logprob": number(surprise),
        }
        for place, (token, surprise, origin) in enumerate(entries)
    ]
    return {"first": session.transcript.first, "position": end, "tokens": tokens}


@router.post("/{name}/feed", response_model=None)
async def feed(request: Request, name: Named, body: FeedBody, asked: Asked) -> EventSourceResponse | Response:
    """Read a text or tokens."""
    session = await _session(asked, name)
    place = session.place
    tokens = await _tokens(session, place, body.text, body.tokens, asked.service)
    if not tokens:
        raise ApiError(400, "text is empty; expected a text, or tokens, to read", param="text")
    wanted = _wanted(session.model, body, body.answers)
    turn = _turn(asked.service, session, place, tokens, None, wanted)
    return await _answer(request, asked.service, session, turn, body.stream)


@router.post("/{name}/generate", response_model=None)
async def generate(request: Request, name: Named, body: GenerateBody, asked: Asked) -> EventSourceResponse | Response:
    """Read a text or tokens, if any, and write."""
    session = await _session(asked, name)
    if not session.model.predicts_tokens:
        message = f"model is {session.model.name!r}, which predicts classes; expected one that predicts tokens"
        raise ApiError(400, message, code="cannot_generate")
    place = session.place
    tokens = await _tokens(session, place, body.text, body.tokens, asked.service)
    if not tokens and not place.n_tokens:
        tokens = session.model.first_tokens()
    config = GenerationConfig(
        max_tokens=allowed_tokens(asked.service, body.max_tokens, "max_tokens"),
        sampling=sampling_of(body),
        seed=secrets.randbits(62) if body.seed is None else body.seed,
        stop=stops_of(session.model, body.stop),
    )
    wanted = _wanted(session.model, body, 0)
    turn = _turn(asked.service, session, place, tokens, config, wanted)
    return await _answer(request, asked.service, session, turn, body.stream)


@router.post("/{name}/fork", status_code=201)
async def fork(request: Request, name: Named, body: ForkBody, asked: Asked) -> dict[str, Any]:
    """Open a session that continues from a place of this one."""
    session = await _session(asked, name)
    twin = await unless_gone(request, asked.service.sessions.fork(session, body.name, body.position))
    return session_json(twin)


@router.post("/{name}/rewind")
async def rewind(request: Request, name: Named, body: RewindBody, asked: Asked) -> dict[str, Any]:
    """Go back to a place; what came after it is forgotten."""
    session = await _session(asked, name)
    await unless_gone(request, asked.service.sessions.rewind(session, body.position))
    return session_json(session)


@router.post("/{name}/save")
async def save(name: Named, body: LabelBody, asked: Asked) -> dict[str, Any]:
    """Keep a copy of the session under a label, on disk."""
    session = await _session(asked, name)
    n_bytes = await asked.service.sessions.save(session, body.label)
    return session_json(session) | {"label": body.label, "bytes": n_bytes}


@router.post("/{name}/load")
async def load(name: Named, body: LabelBody, asked: Asked) -> dict[str, Any]:
    """Go back to the copy under a label."""
    session = await _session(asked, name)
    await asked.service.sessions.load(session, body.label)
    return session_json(session) | {"label": body.label}


# --- parts ---


async def _session(asked: Caller, name: str) -> Session:
    return await asked.service.sessions.get(asked.owner, name)


async def _tokens(
    session: Session, place: Place, text: str | None, tokens: list[int] | None, service: Service
) -> list[int]:
    """The tokens that a turn from `place` reads. While they are encoded the session may move on: then it is refused."""
    if text is not None and tokens is not None:
        raise ApiError(400, "text and tokens are both given; expected one of them", param="tokens")
    if text is not None:
        tokens = await encoded(session.model, text, is_first=place.n_tokens == 0)
    tokens = tokens or []
    session.model.require_tokens(tokens)
    allowed_tokens(service, len(tokens), "tokens")
    return tokens


def _wanted(model: ServedModel, body: TellBody, answers: int) -> Wanted:
    if body.details and not model.gate_layers:
        raise ApiError(400, f"details is true; expected false: {model.name} has no transitions", param="details")
    return Wanted(body.surprise, body.alternatives, answers, body.channels if body.details else 0)


def _turn(
    service: Service, session: Session, place: Place, tokens: list[int], config: GenerationConfig | None, wanted: Wanted
) -> Turn:
    configs = [] if config is None else [config]
    return Turn(session.model, place, tokens, configs, wanted, mark_every=EVERY, deadline=service.deadline())


async def _answer(
    request: Request, service: Service, session: Session, turn: Turn, streams: bool
) -> EventSourceResponse | Response:
    if not streams:
        require_short(turn)
    heard = await begun(request, service.sessions.turn(session, turn))
    numbered = _numbered(session.model, turn, heard)
    if streams:
        return event_stream(heard, _messages(numbered))
    return await whole(request, heard, _turn_json(session, numbered))


async def _turn_json(session: Session, numbered: AsyncIterator[list[tuple[str, dict[str, Any]]]]) -> dict[str, Any]:
    body: dict[str, Any] = {"object": "session.turn", "id": session.name, "tokens": []}
    async for items in numbered:
        for kind, item in items:
            if kind == "token":
                body["tokens"].append(item)
            else:
                body |= item
    if body["finish_reason"] == "error":
        raise turn_failed(body["message"])
    return body


async def _numbered(
    model: ServedModel, turn: Turn, events: AsyncIterator[list[Event]]
) -> AsyncIterator[list[tuple[str, dict[str, Any]]]]:
    """Give tokens with their positions, and the end, as the engine gives them."""
    read, written = turn.place.n_tokens, turn.place.n_tokens + len(turn.tokens)
    async for some in events:
        items = []
        for event in some:
            if isinstance(event, TokenEvent):
                read, written = read + event.was_read, written + (not event.was_read)
                items.append(("token", token_json(model, event, read if event.was_read else written)))
            else:
                items.append(("end", end_json(event)))
        yield items


async def _messages(numbered: AsyncIterator[list[tuple[str, dict[str, Any]]]]) -> AsyncGenerator[bytes, None]:
    async for items in numbered:
        yield b"".join([message(json.dumps(item), kind) for kind, item in items])
