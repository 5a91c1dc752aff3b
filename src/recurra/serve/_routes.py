"""/v1/sessions: streams by name, which last."""

import json
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Annotated, Any

import fastapi
from fastapi import APIRouter, Depends, Path, Query, Response

from recurra.serve._bodies import (
    NAME,
    DetailsBody,
    FeedBody,
    ForkBody,
    GenerateBody,
    OpenBody,
    RewindBody,
    encode,
    require_collectable,
    require_generation,
    require_tokens,
)
from recurra.serve._http import ApiError, refusal, request_failed
from recurra.serve._model import PausedStream, ServedModel
from recurra.serve._openai import number
from recurra.serve._requests import EndEvent, Event, Request, TokenEvent, TokenLogprob
from recurra.serve._service import By, Caller
from recurra.serve._sessions import CHECKPOINT_EVERY, Session
from recurra.serve._store import WRITTEN, SessionInfo
from recurra.serve._streaming import message, respond, unless_gone
from recurra.state import n_bytes

router = APIRouter(prefix="/v1/sessions", tags=["sessions"])


async def _named(name: Annotated[str, Path(pattern=NAME)], by: By) -> Session:
    return await by.service.sessions.get(by.owner, name)


_Named = Annotated[Session, Depends(_named)]


@router.post("", status_code=201)
async def _open_session(body: OpenBody, by: By) -> dict[str, Any]:
    """Open a session."""
    return _session_json(await by.service.sessions.open(by.owner, by.service.model(body.model), body.name))


@router.get("")
async def _list_sessions(
    by: By, limit: Annotated[int, Query(ge=1, le=1000)] = 100, after: Annotated[str, Query(max_length=64)] = ""
) -> dict[str, Any]:
    """List sessions by name, those after `after`."""
    infos = await by.service.sessions.infos(by.owner, limit + 1, after)  # one more tells whether there are more
    data = [_info_json(info, model) for info, model in infos[:limit]]
    return {"object": "list", "data": data, "has_more": len(infos) > limit}


@router.get("/{name}")
async def _show_session(session: _Named) -> dict[str, Any]:
    """Show a session."""
    return _session_json(session)


@router.delete("/{name}")
async def _close_session(name: Annotated[str, Path(pattern=NAME)], by: By) -> dict[str, Any]:
    """Delete a session."""
    await by.service.sessions.close(by.owner, name)
    return {"id": name, "object": "session", "deleted": True}


@router.get("/{name}/transcript")
async def _transcript(
    session: _Named,
    start: Annotated[int, Query(ge=0, lt=2**53)] = 0,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
) -> dict[str, Any]:
    """Return tokens of the transcript, from position `start` on, or from the oldest that is kept."""
    kept = session.transcript
    first, end = max(start, kept.first), len(kept)
    entries = kept.entries(first, min(end, first + limit)) if first < end else []
    text = session.model.text_pieces(kept.tokens(max(kept.first, first - 16), first) if entries else [])
    tokens = [
        {
            "position": first + index + 1,
            "id": token,
            "text": text(token),
            "from": "written" if origin == WRITTEN else "read",
            "logprob": number(logprob),
        }
        for index, (token, logprob, origin) in enumerate(entries)
    ]
    return {"first": kept.first, "position": end, "tokens": tokens}


@router.post("/{name}/fork", status_code=201)
async def _fork(client: fastapi.Request, session: _Named, body: ForkBody, by: By) -> dict[str, Any]:
    """Open a session that continues from a position of this one."""
    return _session_json(await unless_gone(client, by.service.sessions.fork(session, body.name, body.position)))


@router.post("/{name}/rewind")
async def _rewind(client: fastapi.Request, session: _Named, body: RewindBody, by: By) -> dict[str, Any]:
    """Go back to a position; what came after it is forgotten."""
    await unless_gone(client, by.service.sessions.rewind(session, body.position))
    return _session_json(session)


def _session_json(session: Session) -> dict[str, Any]:
    model, position = session.model, session.state.position
    info = SessionInfo(session.name, model.name, session.created, session.used, position)
    sizes = {"state_bytes": n_bytes(session.state.model_state), "cache_bytes": model.cache_bytes_per_token * position}
    return _info_json(info, model.name) | sizes


def _info_json(info: SessionInfo, model: str | None) -> dict[str, Any]:
    times = {"created": info.created, "used": info.used}
    whole = {name: None if seconds is None else int(seconds) for name, seconds in times.items()}
    return {"id": info.name, "object": "session", "model": model, **whole, "position": info.position}


@router.post("/{name}/feed", response_model=None)
async def _feed(client: fastapi.Request, session: _Named, body: FeedBody, by: By) -> Response:
    """Read a text or tokens."""
    start = session.state
    tokens = await _tokens(session, start, body, by)
    if not tokens:
        raise refusal("text", "empty", "a text, or tokens, to read")
    details = body.token_details(session.model, body.answers)
    request = Request(session.model, start, tokens, [], details)
    return await _answer(client, session, request, body.stream, by)


@router.post("/{name}/generate", response_model=None)
async def _generate(client: fastapi.Request, session: _Named, body: GenerateBody, by: By) -> Response:
    """Read a text or tokens, if any, and write."""
    require_generation(session.model)
    start = session.state
    tokens = await _tokens(session, start, body, by)
    if not tokens and not start.position:
        tokens = session.model.first_tokens()
    by.service.require_allowed(max_tokens=body.max_tokens)
    configs = body.configs(session.model, body.max_tokens)
    details = body.token_details(session.model)
    constraint = await body.constraint(session.model)
    request = Request(session.model, start, tokens, configs, details, constraint=constraint)
    return await _answer(client, session, request, body.stream, by)


async def _tokens(session: Session, start: PausedStream, body: DetailsBody, by: Caller) -> list[int]:
    """Return the tokens to read from `start`. If the session moves on while they are encoded, it refuses them."""
    if body.text is not None and body.tokens is not None:
        raise ApiError(400, "text and tokens are both given; expected one of them", param="tokens")
    tokens = body.tokens or []
    if body.text is not None:
        (tokens,) = await encode(session.model, body.text, is_first=start.position == 0)
    require_tokens(session.model, tokens=tokens)
    by.service.require_allowed(tokens=len(tokens))
    return tokens


async def _answer(client: fastapi.Request, session: Session, request: Request, streams: bool, by: Caller) -> Response:
    request.checkpoint_every, request.deadline, request.owner = CHECKPOINT_EVERY, by.service.deadline(), by.owner
    if not streams:
        require_collectable(request)

    async def items(events: AsyncIterator[list[Event]]) -> AsyncIterator[list[tuple[str, dict[str, Any]]]]:
        """Yield tokens, each with its position, and the end, as the engine reports them."""
        read, written = request.start.position, request.start.position + len(request.tokens)
        async for some in events:
            found = []
            for event in some:
                if isinstance(event, TokenEvent):
                    read, written = read + event.was_read, written + (not event.was_read)
                    position = read if event.was_read else written
                    found.append(("token", _token_json(request.model, event, position)))
                else:
                    found.append(("end", _end_json(event)))
            yield found

    async def messages(events: AsyncIterator[list[Event]]) -> AsyncGenerator[bytes, None]:
        async for some in items(events):
            yield b"".join([message(json.dumps(item), kind) for kind, item in some])

    async def collect(events: AsyncIterator[list[Event]]) -> dict[str, Any]:
        body: dict[str, Any] = {"object": "session.turn", "id": session.name, "tokens": []}
        async for some in items(events):
            body["tokens"] += [item for kind, item in some if kind == "token"]
            body |= next((item for kind, item in some if kind == "end"), {})
        if body["finish_reason"] == "error":
            raise request_failed(body["message"], body["code"])
        return body

    return await respond(client, by.service.sessions.run(session, request), streams, messages, collect)


def _token_json(model: ServedModel, event: TokenEvent, position: int) -> dict[str, Any]:
    body: dict[str, Any] = {
        "position": position,
        "id": event.id,
        "text": event.text,
        "from": "read" if event.was_read else "written",
        "logprob": number(event.logprob),
    }
    if event.alternatives:
        body["alternatives"] = [_logprob_json(model, one) for one in event.alternatives]
    if event.answers:
        body["answers"] = [_logprob_json(model, one) for one in event.answers]
    if event.gates is not None:
        body["gates"] = event.gates
    return body


def _logprob_json(model: ServedModel, one: TokenLogprob) -> dict[str, Any]:
    text = model.text_of(one.id) if model.predicts_tokens else str(one.id)
    return {"id": one.id, "text": text, "logprob": number(one.logprob)}


def _end_json(end: EndEvent) -> dict[str, Any]:
    body: dict[str, Any] = {"finish_reason": end.reason, "position": end.state.position, "text": end.text}
    return body | ({"message": end.message, "code": end.code} if end.message else {})
