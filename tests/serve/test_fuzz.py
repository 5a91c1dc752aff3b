"""Requests drawn from the server's own description of itself, wrong ones above all: no 5xx, no leak between keys."""

import warnings

import httpx
import hypothesis
import schemathesis
from hypothesis import HealthCheck, Phase, given
from hypothesis import strategies as st
from schemathesis import GenerationMode

SECRET, MINE, YOURS = "4,4,4,3,3,3,2,2,2", "first-key-0123", "second-key-0123"
TEXT = "abba.abba.abba"
FORM = {"message", "type", "param", "code"}


def send(client: httpx.Client, case: schemathesis.Case) -> httpx.Response:
    """Send a case as it is, with the second key whatever it says about that."""
    arguments = case.as_transport_kwargs(base_url=str(client.base_url))
    headers = {name: value for name, value in dict(arguments["headers"]).items() if name.lower() != "authorization"}
    headers["authorization"] = f"Bearer {YOURS}"
    body = {name: arguments[name] for name in ("json", "data", "params", "cookies") if arguments.get(name) is not None}
    if "data" in body:
        body["content"] = body.pop("data")
    return client.request(arguments["method"], arguments["url"], headers=headers, **body)


def fuzz(running, n_requests: int, paths: tuple[str, ...] = ()) -> int:
    """Send requests to every endpoint in turn, or to those of some paths; give how many were refused."""
    mine, yours = running.client(authorization=f"Bearer {MINE}"), running.client(authorization=f"Bearer {YOURS}")
    mine.post("/v1/sessions", json={"name": "a"})
    mine.post("/v1/sessions/a/feed", json={"text": TEXT})
    before = mine.get("/v1/sessions/a/transcript").json()
    schema = schemathesis.openapi.from_dict(yours.get("/openapi.json").json())
    operations = [result.ok() for result in schema.get_all_operations()]
    operations = [operation for operation in operations if not paths or operation.path in paths]
    refused = 0

    def strategy(operation):
        modes = (GenerationMode.NEGATIVE, GenerationMode.NEGATIVE, GenerationMode.POSITIVE)
        return st.sampled_from(modes).flatmap(lambda mode: operation.as_strategy(generation_mode=mode))

    for operation in operations:

        @hypothesis.settings(
            max_examples=-(-n_requests // len(operations)),
            phases=[Phase.generate],
            deadline=None,
            suppress_health_check=list(HealthCheck),
            database=None,
        )
        @given(strategy(operation), st.booleans())
        def one(case, is_open):
            nonlocal refused
            if is_open and "name" in case.path_parameters:  # beside names that nobody has
                case.path_parameters["name"] = "b"
                yours.post("/v1/sessions", json={"name": "b"})
            if isinstance(case.body, dict) and isinstance(case.body.get("max_tokens"), int):
                case.body["max_tokens"] = min(case.body["max_tokens"], 20)
            answer = send(yours, case)
            assert answer.status_code < 500, (case.as_curl_command(), answer.text)
            assert TEXT not in answer.text
            if answer.status_code >= 400:
                refused += 1
                if "json" in answer.headers.get("content-type", ""):
                    assert set(answer.json()["error"]) == FORM, answer.text
                assert "Traceback" not in answer.text

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            one()
    assert mine.get("/v1/sessions/a/transcript").json() == before
    assert not [turn for turn in mine.get("/v1/sessions").json()["data"] if turn["id"] != "a"]
    return refused


def test_a_sample_of_wrong_requests(serving):
    paths = ("/v1/completions", "/v1/chat/completions", "/v1/sessions/{name}/generate", "/v1/sessions")
    assert fuzz(serving(api_keys=(MINE, YOURS), max_tokens=200), 32, paths) > 6
