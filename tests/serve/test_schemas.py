"""Schemas that no finite value fulfils: a grammar of one would allow nothing in the middle of an answer."""

import pytest
from tests.serve.scripted import ASK, WRITTEN, scripted, template

from recurra.serve import _schemas
from recurra.serve._http import ServeSettings
from recurra.serve._schemas import endless
from recurra.serve._service import Service

from .conftest import Running


def needing(**properties) -> dict:
    return {"type": "object", "properties": properties, "required": list(properties)}


def to(place: str) -> dict:
    return {"$ref": place}


N = to("#/$defs/n")
ENDLESS = [
    (needing(a=to("#/properties/a")), "#/properties/a"),
    ({"properties": {"a": to("#/properties/a")}}, "#/properties/a"),  # `"a":` would have no end
    (to("#"), "#"),
    (needing(a=to("#")), "#/properties/a"),
    ({**needing(a=N), "$defs": {"n": to("#/$defs/m"), "m": N}}, "#/properties/a"),
    (needing(a={"anyOf": [to("#/properties/a")] * 7}), "#/properties/a/anyOf/0"),
    (needing(a={"allOf": [{}, to("#/properties/a")]}), "#/properties/a/allOf/1"),
    ({**needing(a=N), "$defs": {"n": needing(n=N)}}, "#/properties/a"),
    (needing(a={"type": "array", "minItems": 1, "items": to("#/properties/a")}), "#/properties/a/items"),
    (
        needing(a={"type": "array", "minItems": 2, "prefixItems": [{}, to("#/properties/a/prefixItems/1")]}),
        "#/properties/a/prefixItems/1",
    ),
    ({"type": "object", "required": ["z"], "additionalProperties": to("#/additionalProperties")}, "#/properties/z"),
    ({"$id": "http://x/y", **needing(a=to("http://x/y#/properties/a"))}, "#/properties/a"),
    ({**needing(a=to("#/$defs/x~1y")), "$defs": {"x/y": to("#/$defs/x%2Fy")}}, "#/properties/a"),
]
FINITE = [
    {},
    {"properties": 3, "required": [{}], "anyOf": [], "allOf": 3, "type": {}, "prefixItems": 1},
    needing(a={"anyOf": [to("#/properties/a"), {"type": "integer"}]}),
    {**needing(a=N), "$defs": {"n": {"type": "object", "properties": {"n": N}}}},
    {**needing(a=N), "$defs": {"n": {"type": "array", "items": N}}},
    {**needing(a={}), "$defs": {"n": N}},
    needing(a=to("#an-anchor")),
    {**needing(a=N, b=to("#/$defs/m")), "$defs": {"n": {"anyOf": [to("#/$defs/m"), {}]}, "m": needing(n=N)}},
]


@pytest.mark.parametrize(("schema", "place"), ENDLESS, ids=str)
def test_what_needs_itself_is_endless(schema, place):
    assert endless(schema) == place


@pytest.mark.parametrize("schema", FINITE, ids=str)
def test_what_may_end_is_not(schema):
    assert endless(schema) is None


@pytest.mark.parametrize("begin", [0, 1])
def test_chains_take_linear_time_in_any_order(monkeypatch, begin):
    """Counted in schemas that are taken apart."""
    parts, seen = _schemas._parts, []
    monkeypatch.setattr(_schemas, "_parts", lambda *given: seen.append(1) or parts(*given))
    chain = {f"d{n}": needing(x=to(f"#/$defs/d{n + 1}")) for n in range(3000)} | {"d3000": {}}
    order = [to(f"#/$defs/{name}") for name in chain][:: -1 if begin else 1]
    assert endless({"anyOf": order, "$defs": chain}) is None
    assert len(seen) < 4 * len(chain)


def test_endless_schemas_are_refused_by_name():
    models = [scripted(kind, template(kind)) for kind in WRITTEN]
    endless_form = {"type": "json_schema", "json_schema": {"schema": needing(a=to("#/properties/a"))}}
    function = {"name": "f", "parameters": {**needing(a={"type": "object", **N}), "$defs": {"n": N}}}
    tools = [{"type": "function", "function": function}]
    strict = [{"type": "function", "function": {**function, "strict": True}}]
    asked = [{"tools": tools, "tool_choice": "required"}, {"tools": strict}]
    with Running(Service(models, ServeSettings(), threads=1)) as server:
        client = server.client()
        for kind in WRITTEN:
            for extra in (*asked, {"response_format": endless_form}):
                for stream in (False, True):
                    body = {"model": kind, "messages": ASK, "max_tokens": 60, "stream": stream, **extra}
                    answer = client.post("/v1/chat/completions", json=body)
                    error = answer.json()["error"]
                    assert (answer.status_code, error["param"]) == (
                        400,
                        "tools" if "tools" in extra else "response_format",
                    )
                    name = "the schema of f " if "tools" in extra else "the schema of response_format "
                    assert error["message"].startswith(f"{name}is infinitely recursive at #/properties/a; expected")
            body = {"model": kind, "messages": ASK, "max_tokens": 5, "tools": tools}
            assert client.post("/v1/chat/completions", json=body).status_code == 200
