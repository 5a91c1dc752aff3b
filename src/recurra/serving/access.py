"""Who asks: the key of a request, and whose sessions it may see."""

import hashlib
import hmac
from dataclasses import dataclass

from fastapi import Request

from recurra.serving.errors import ApiError
from recurra.serving.service import Service


@dataclass(frozen=True)
class Caller:
    """Who asks. `owner` stands for the key; sessions belong to it."""

    service: Service
    owner: str


def caller(request: Request) -> Caller:
    """Find out who asks. Raises ApiError without a valid key where one is needed."""
    service: Service = request.app.state.service
    keys = service.settings.api_keys
    if not keys:
        return Caller(service, "")
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    digest = _digest(given.strip())
    # every key is compared, each in constant time, so that time says nothing about them
    matches = [hmac.compare_digest(digest, _digest(key)) for key in keys]
    if scheme.lower() != "bearer" or not any(matches):
        raise ApiError(
            401, "the API key is missing or wrong; expected Authorization: Bearer KEY", code="invalid_api_key"
        )
    return Caller(service, digest)


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()
