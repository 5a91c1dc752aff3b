"""A request continues from what was read before, and answers to the bit what it answers without."""

import random
import sqlite3
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recurra.decoding.packing import pack_linear_layers
from recurra.models.language_model import LanguageModel, LanguageModelConfig
from recurra.serve import _store as store
from recurra.serve._http import ServeSettings
from recurra.serve._model import PausedStream, ServedModel
from recurra.serve._prefixes import PrefixCache
from recurra.serve._requests import SHORTEST_CHUNK, Request, TokenDetails
from recurra.serve._service import Service
from recurra.state import tensors

from .conftest import VOCABULARY, Letters, Rounds, Running, asking

LOGPROBS = TokenDetails(True, 3)


@pytest.fixture(scope="module", params=["the model", "programs"])
def served(request) -> ServedModel:
    """What reads it has the same bits on every processor; 32 channels fill whole vectors."""
    torch.manual_seed(0)
    model = LanguageModel(LanguageModelConfig(VOCABULARY, None, 2, 32, 64)).eval()
    if request.param == "programs":
        return ServedModel("prefixes", model, Letters(), weights="int8")
    return ServedModel("prefixes", pack_linear_layers(model, "bfloat16"), Letters())


@pytest.fixture
def rounds() -> Rounds:
    return Rounds(prefixes=PrefixCache(2**20))


def some(n: int, seed: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(VOCABULARY) for _ in range(n)]


def wish(served: ServedModel, tokens: list[int], n: int = 4, owner: str = "me", choices: int = 1, **fields) -> Request:
    configs = [asking(n, seed) for seed in range(choices)] if n else []
    return Request(served, served.start, tokens, configs, owner=owner, **{"reports_prompt": False, **fields})


def found(rounds: Rounds, request: Request) -> list:
    """All that a request brings: tokens with log-probabilities, and the numbers of the states at the ends."""
    states = [list(map(torch.Tensor.tolist, tensors(end.state.model_state))) for end in rounds.ends(request)]
    return [rounds.tokens(request), states]


def afresh(served: ServedModel, request: Request) -> list:
    alone = Rounds()
    twin = Request(served, served.start, request.tokens, request.configs, LOGPROBS, reports_prompt=False)
    alone.run(twin)
    return found(alone, twin)


def test_any_prefix_gives_the_same_bits_under_any_load(served, rounds):
    """Prompts that leave each other at any token, at any time: log-probabilities and last states do not change."""
    base, requests, chance = some(400, 0), [], random.Random(0)
    for number in range(24):
        prompt = [*base[: chance.choice([0, 5, 15, 16, 17, 100, 101, 300, 390])], *some(chance.randint(1, 60), number)]
        requests.append(wish(served, prompt, details=LOGPROBS))
        rounds.run(requests[-1], rounds=chance.randint(0, 3))
    rounds.run()
    assert sum(request.n_cached > 0 for request in requests) > 9
    for request in requests:
        assert found(rounds, request) == afresh(served, request)


def test_pieces_of_any_length_have_the_products_of_long_ones(rounds, monkeypatch):
    """In float32, torch multiplies many vectors, as often as not in another order than few."""
    torch.manual_seed(0)
    model = LanguageModel(LanguageModelConfig(VOCABULARY, None, 2, 32, 64)).eval()
    plain, read, sizes = ServedModel("plain", model, Letters()), ServedModel.read, []
    monkeypatch.setattr(ServedModel, "read", lambda *words: sizes.append(words[1].shape) or read(*words))
    requests = [wish(plain, [*some(100, 0), *some(rest, rest)]) for rest in (30, 1, 2, 9, 9, 20)]
    for request in requests:
        rounds.run(request)
    assert [request.n_cached for request in requests] == [0, 0, 100, 100, 108, 100]
    assert all(n_steps >= SHORTEST_CHUNK or n_steps * n_copies > 64 for n_copies, n_steps in sizes)
    for request in requests:
        twin = wish(plain, request.tokens, owner=None)
        rounds.run(twin)
        for state, alone in zip(*(tensors(rounds.ends(one)[0].state.model_state) for one in (request, twin))):
            torch.testing.assert_close(state, alone, rtol=1e-5, atol=1e-6)


def test_few_tokens_of_many_streams_have_the_bits_of_each_alone(served, monkeypatch):
    states = [served.advance(torch.tensor([some(20, seed)]), [served.start.model_state])[0] for seed in range(8)]
    tokens = torch.tensor([some(3, seed) for seed in range(8)])
    alone = [served.read(row[None], [state])[1][0] for row, state in zip(tokens, states)]
    if served.weights is not None:
        monkeypatch.setattr(served._pieces, "read_in_pieces", None)  # steps read them
    together = served.advance(tokens, states)
    assert all(map(torch.equal, tensors(together), tensors(alone)))


def test_the_same_prompt_is_read_once(served, rounds):
    for number in range(3):
        request = wish(served, some(500, 0), details=LOGPROBS)
        rounds.run(request)
        assert request.n_cached == (499 if number else 0)
        assert found(rounds, request) == afresh(served, request)
    assert rounds.engine.counters.read == 499


def test_where_two_prompts_part_a_third_begins(served, rounds):
    cached = []
    for seed in range(3):
        request = wish(served, [*some(100, 9), seed, *some(50, seed)])
        rounds.run(request)
        cached.append(request.n_cached)
    assert cached == [0, 0, 100]


def test_long_prompts_leave_states_on_the_way(served, rounds):
    rounds.run(wish(served, [*some(2100, 9), 1, *some(50, 1)]))
    request = wish(served, [*some(2100, 9), 2, *some(50, 2)])
    rounds.run(request)
    assert request.n_cached == 2048


def test_a_chat_pays_for_its_new_tokens_alone(served, rounds):
    """An answer is read in the background: its state is the one that reading gives."""
    text, new = some(40, 0), 0
    for turn in range(8):
        request = wish(served, text, 20, details=LOGPROBS)
        rounds.run(request)
        assert request.n_cached == (new and len(text) - 21)
        if turn % 6 == 1:
            assert found(rounds, request) == afresh(served, request)
        new = 20
        text = [*text, *rounds.written(request), *some(20, turn)]
    assert rounds.engine.counters.read == len(text) - 21


def test_requests_that_share_a_prefix_wait_for_it(served, rounds):
    requests = [wish(served, [*some(400, 0), number, *some(30, number)]) for number in range(30)]
    rounds.run(*requests)
    assert sum(request.n_cached for request in requests) == 29 * 400
    assert rounds.engine.counters.read == 400 + 30 * 30
    for request in requests[::10]:
        assert rounds.written(request) == [event.id for event in afresh(served, request)[0]]


@pytest.mark.parametrize("ending", ["cancelled", "error"])
def test_a_reader_that_ends_leaves_nothing_wrong_and_nobody_behind(served, rounds, ending, monkeypatch):
    reader, *others = [wish(served, [*some(700, 0), number, *some(40, number)]) for number in range(3)]
    rounds.run(reader, *others, rounds=1)
    assert [request.is_waiting for request in others] == [True, True]
    if ending == "cancelled":
        rounds.engine.cancel(reader)
    else:
        with monkeypatch.context() as broken:
            broken.setattr(ServedModel, "read", lambda *_: 1 / 0)
            rounds.run(rounds=1)
    rounds.run()
    assert [rounds.ends(request)[0].reason for request in (reader, *others)] == [ending, "length", "length"]
    for request in others:
        assert rounds.written(request) == [event.id for event in afresh(served, request)[0]]
    assert others[1].n_cached == 700


def test_texts_of_one_request_share_its_prompt(served, rounds):
    for _ in range(2):
        request = wish(served, some(60, 0), choices=3)
        rounds.run(request)
    twin = wish(served, some(60, 0), choices=3, owner=None)
    rounds.run(twin)
    assert request.n_cached == 59
    assert [rounds.written(request, choice) for choice in range(3)] == [rounds.written(twin, c) for c in range(3)]


def test_keys_and_models_see_their_own_prefixes_alone(served, rounds):
    other = ServedModel("other", served.plain, Letters())
    other.weights = "int8"  # the same weights, kept otherwise
    for model, owner in ((served, "me"), (served, "you"), (other, "me")):
        request = wish(model, some(60, 0), owner=owner)
        rounds.run(request)
        assert request.n_cached == 0
    again = wish(served, some(60, 0), owner="you")
    rounds.run(again)
    assert again.n_cached == 59


def test_prompts_that_are_reported_are_read(served, rounds):
    for _ in range(2):
        request = wish(served, some(60, 0), details=LOGPROBS, reports_prompt=True)
        rounds.run(request)
        assert (request.n_cached, len(rounds.tokens(request))) == (0, 64)


def test_the_least_recently_used_states_go_first(served):
    request = wish(served, some(60, 0), 0)
    rounds = Rounds(prefixes=(cache := PrefixCache(2**20)))
    rounds.run(request)
    size = cache.n_bytes
    rounds = Rounds(prefixes=(cache := PrefixCache(3 * size)))
    for seed in (0, 1, 2, 0, 3):
        rounds.run(wish(served, some(60, seed), 0))
        assert cache.n_bytes <= 3 * size
    for seed, n_cached in ((0, 59), (2, 59), (3, 59), (1, 0)):
        rounds.run(request := wish(served, some(60, seed), 0))
        assert request.n_cached == n_cached


def nodes(node) -> list:
    return [node, *(below for child in node.children.values() for below in nodes(child))]


@settings(max_examples=25)
@given(st.lists(st.tuples(st.lists(st.integers(0, 1), max_size=5), st.sampled_from(["read", "cancel"])), max_size=30))
def test_the_tree_finds_the_longest_prefix_that_is_kept(asked):
    """Compared with a dictionary of all prefixes; tokens come in blocks, so that prompts share many prefixes."""
    model = SimpleNamespace(fingerprint="f", weights=None, state_bytes=2**30)
    cache, kept = PrefixCache(12 * 1500), {}
    for blocks, ending in asked:
        tokens = [bit for block in blocks for bit in [block] * 20]
        request = Request(model, PausedStream(None), [*tokens, 9], [], owner="me")
        cache.claim(request)
        cache_has = {end: kept.get(tuple(tokens[:end])) for end in range(len(tokens) + 1)}
        assert request.prompt_state is None or request.prompt_state is cache_has[request.n_read]
        held = {node.end for node in nodes(cache._root("me", "f None")) if node.state is not None}
        assert len(cache) == sum(node.state is not None for node in nodes(cache._root("me", "f None")))
        assert request.n_read in {0} | held
        while request.n_left and not (ending == "cancel" and len(request.marks) < 2):
            assert request.n_next >= SHORTEST_CHUNK  # the blocks are longer
            request.n_read += request.n_next
            request.prompt_state = kept.setdefault(tuple(tokens[: request.n_read]), torch.zeros(100))
            cache.take(request)
        cache.release(request)
        assert cache.n_bytes <= 12 * 1500
        for node in nodes(cache._root("me", "f None")):
            assert node.reader is None
            assert node.state is not None or node.children or node.parent is None
            assert all(
                child.parent is node and child.end - len(child.tokens) == node.end for child in node.children.values()
            )
            if node.state is not None:
                prefix = memoryview(node.prefix()).cast("i").tolist()
                assert len(prefix) == node.end
                assert kept[tuple(prefix)] is node.state


BODY = {"model": "letters", "prompt": "the same text for everybody, " * 4, "max_tokens": 5, "temperature": 0}


def test_usage_and_metrics_tell_what_was_cached(serving):
    client = serving().client()
    usages = [client.post("/v1/completions", json=BODY).json()["usage"] for _ in range(2)]
    assert [usage["prompt_tokens_details"] for usage in usages] == [{"cached_tokens": 0}, {"cached_tokens": 115}]
    chat = {"model": "letters", "messages": [{"role": "user", "content": "hello there, and more"}], "max_tokens": 3}
    streamed = chat | {"stream": True, "stream_options": {"include_usage": True}}
    client.post("/v1/chat/completions", json=chat).raise_for_status()
    assert '"cached_tokens": 38}' in client.post("/v1/chat/completions", json=streamed).text
    lines = client.get("/metrics").text.splitlines()
    assert {"recurra_prefix_lookups_total 4.0", "recurra_prefix_hits_total 2.0", "recurra_prefix_hit_rate 0.5"} < {
        *lines
    }
    assert "recurra_tokens_cached_total 153.0" in lines


def test_the_cache_can_be_turned_off(serving):
    client = serving(prefix_cache_bytes=0).client()
    usages = [client.post("/v1/completions", json=BODY).json()["usage"] for _ in range(2)]
    assert [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages] == [0, 0]
    assert "recurra_prefix" not in client.get("/metrics").text
    with pytest.raises(ValueError, match="prefix_cache_bytes is -1"):
        ServeSettings(prefix_cache_bytes=-1)


def test_another_key_s_prompt_is_not_cached(serving):
    running = serving(api_keys=("first-key-0123", "second-key-0123"))
    for key, cached in (("first-key-0123", 0), ("second-key-0123", 0), ("first-key-0123", 115)):
        client = running.client(Authorization=f"Bearer {key}")
        usage = client.post("/v1/completions", json=BODY).json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == cached


def test_a_session_s_first_request_uses_prefixes_too(serving):
    running = serving()
    client = running.client()
    first = client.post("/v1/completions", json=BODY).json()["choices"][0]["text"]
    client.post("/v1/sessions", json={"name": "a"}).raise_for_status()
    body = {"text": BODY["prompt"], "surprise": False, "max_tokens": 5, "temperature": 0, "stream": False}
    turn = client.post("/v1/sessions/a/generate", json=body).json()
    assert "".join(token["text"] for token in turn["tokens"] if token["from"] == "written") == first
    assert running.service.prefixes.n_tokens == 115


def cached_after_restart(models, file, **settings) -> int:
    with Running(Service(models, ServeSettings(sessions_file=file, **settings), threads=1)) as running:
        answer = running.client().post("/v1/completions", json=BODY).json()
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.fixture(scope="module")
def saved(models, tmp_path_factory) -> bytes:
    """A sessions file with the prefix of a prompt, as a server has left it."""
    file = tmp_path_factory.mktemp("saved") / "sessions.sqlite"
    assert cached_after_restart(models, file) == 0
    assert cached_after_restart(models, file) == 115
    return file.read_bytes()


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE prefixes SET model = 'other'",
        "UPDATE prefixes SET state = zeroblob(length(state))",
        "UPDATE prefixes SET tokens = zeroblob(length(tokens))",
        "UPDATE prefixes SET owner = 'me'",
        "UPDATE prefixes SET digest = x''",
    ],
)
def test_prefixes_survive_a_restart_unless_they_are_damaged_or_foreign(models, saved, tmp_path, damage):
    file = tmp_path / "sessions.sqlite"
    file.write_bytes(saved)
    with sqlite3.connect(file) as database:
        database.execute(damage)
    database.close()
    assert cached_after_restart(models, file) == 0


def test_a_saved_state_that_does_not_fit_the_model_is_skipped(models, tmp_path):
    kept = store.SessionStore(tmp_path / "s")
    for state in (models[0].start.model_state, [torch.zeros(1)]):
        kept.submit(store.write_prefix, 20_000, "me", "m", bytes(4 + 4 * isinstance(state, list)), state).result(10)
    assert [row[2] for row in kept.submit(store.read_prefixes, {"m": models[0].plain}).result(10)] == [bytes(4)]
    kept.close()


def test_the_file_keeps_the_newest_prefixes(models, tmp_path):
    kept = store.SessionStore(tmp_path / "s")
    state = models[0].start.model_state
    for number in range(256):
        tokens = number.to_bytes(4, "little") * 20
        kept.submit(store.write_prefix, 20_000, "me", "m", tokens, state).result(10)
    rows = kept.submit(store.read_prefixes, {"m": models[0].plain}).result(10)
    assert rows[-1][2] == (255).to_bytes(4, "little") * 20
    assert sum(len(store.pack(state)) + len(row[2]) for row in rows) <= 20_000
    kept.close()
