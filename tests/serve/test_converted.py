"""Published hybrids, converted to runs and served: chats by their templates, sessions, forks and gates."""

import base64
import json

import pytest
import torch
import transformers
from tests.convert.published.conftest import GRANITE, HYBRID, QWEN, SIZES
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional
from transformers import PreTrainedTokenizerFast

from recurra import open_run
from recurra.convert.published.folder import from_huggingface
from recurra.serve._app import _load_model
from recurra.serve._http import ServeSettings
from recurra.serve._service import Service
from recurra.state import n_bytes
from recurra.streams.sampling import SamplingConfig
from recurra.streams.stream import Stream
from recurra.train.formats import convert_model

from .conftest import Running

TEXT = "The state is what remains of all that was read. " * 3
TEMPLATE = """
{%- macro head(role) %}{{- '<|im_start|>' + role + '\\n' }}{% endmacro %}
{%- if tools %}{{- raise_exception('no tools') }}{%- endif %}
{%- for message in messages %}
    {{- head(message.role) + message.content|trim + eos_token + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- head('assistant') }}{%- endif %}
"""
CHAT = [{"role": "system", "content": "Be brief. "}, {"role": "user", "content": TEXT}]
N_TOKENS = 280
FAMILIES = {
    "qwen": ("Qwen3_5", {**QWEN, "layer_types": HYBRID, "num_hidden_layers": 2}),
    "granite": ("GraniteMoeHybrid", {**GRANITE, "num_local_experts": 4, "num_experts_per_tok": 2}),
}
ROUNDED = {"kv_cache_dtype": "int8", "state_dtype": "int16"}
KINDS = [("qwen", "float32", {}), ("granite", "float32", {}), ("qwen", "int8", ROUNDED)]
"""Families, weights and states."""
LAYERS = {"qwen": {0: 8}, "granite": {0: 6, 2: 6}}
"""The channels of the layers with a decay: that of every head, and of the delta rule also the one along its key."""


def tokenizer() -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
    made.train_from_iterator(
        [TEXT], trainers.BpeTrainer(vocab_size=N_TOKENS, initial_alphabet=alphabet, special_tokens=special)
    )
    return made


class Converted:
    """A published model, the run that it became, and a server of it."""

    def __init__(self, family: str, weights: str, dtypes: dict[str, str], folder) -> None:
        self.family, self.folder, self.run = family, folder / "published", folder / "run"
        kind, settings = FAMILIES[family]
        made = getattr(transformers, f"{kind}ForCausalLM")
        torch.manual_seed(0)
        size = {"vocab_size": N_TOKENS + 4, "eos_token_id": 2, "pad_token_id": None}
        self.peer = made(made.config_class(**{**SIZES, **settings, **size})).eval()
        self.peer.config._experts_implementation = "eager"
        with torch.no_grad():
            for parameter in self.peer.parameters():
                parameter.normal_(0, 0.3)
        self.peer.save_pretrained(self.folder)
        tokenizer().save(str(self.folder / "tokenizer.json"))
        special = {"eos_token": {"content": "<|im_end|>"}, "bos_token": None}
        (self.folder / "tokenizer_config.json").write_text(json.dumps(special))
        (self.folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2]}))
        (self.folder / "chat_template.jinja").write_text(TEMPLATE)
        convert_model(self.folder, self.run, "run")
        self.served = _load_model(str(self.run), weights, "best", [], dtypes)

    def chat(self, client, **body):
        body = {"model": "run", "messages": CHAT, "max_tokens": 6, "temperature": 0, **body}
        answer = client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def tokens(self) -> list[int]:
        """What transformers makes of the chat."""
        theirs = PreTrainedTokenizerFast(tokenizer_file=str(self.folder / "tokenizer.json"), eos_token="<|im_end|>")
        text = theirs.apply_chat_template(CHAT, chat_template=TEMPLATE, add_generation_prompt=True, tokenize=False)
        return theirs(text)["input_ids"]

    @torch.inference_mode()
    def continued(self, tokens: list[int], n: int) -> list[int]:
        """The likeliest tokens that follow, one after the other, of those that the tokenizer has."""
        for _ in range(n):
            tokens = [
                *tokens,
                int(self.peer(torch.tensor([tokens]), use_cache=False).logits[0, -1, :N_TOKENS].argmax()),
            ]
        return tokens[-n:]

    @torch.no_grad()
    def decays(self, tokens: list[int]) -> torch.Tensor:
        """Of the heads of the first block, by the names of transformers' class."""
        block = self.peer.model.layers[0]
        x = block.input_layernorm(self.peer.model.embed_tokens(torch.tensor(tokens)) * self.multiplier)
        if self.family == "qwen":
            mixer, step = block.linear_attn, block.linear_attn.in_proj_a(x)
        else:
            mixer, step = block.mamba, block.mamba.in_proj(x)[:, -block.mamba.num_heads :]
        return torch.exp(-mixer.A_log.exp() * functional.softplus(step + mixer.dt_bias))

    @property
    def multiplier(self) -> float:
        return getattr(self.peer.config, "embedding_multiplier", 1.0)


@pytest.fixture(scope="module", params=KINDS, ids=str)
def converted(request, tmp_path_factory) -> Converted:
    return Converted(*request.param, tmp_path_factory.mktemp(request.param[0]))


@pytest.fixture(scope="module")
def client(converted):
    with Running(Service([converted.served], ServeSettings(), threads=1)) as running:
        yield running.client()


def test_a_chat_is_that_of_the_published_model(converted, client):
    answer, tokens = converted.chat(client), converted.tokens()
    read = client.post("/tokenize", json={"messages": CHAT}).json()
    assert read["tokens"] == tokens
    assert answer["usage"]["prompt_tokens"] == len(tokens)
    if converted.served.weights == "float32":
        text = tokenizer().decode(converted.continued(tokens, 6), skip_special_tokens=False)
        assert answer["choices"][0]["message"]["content"] == text
    stream = Stream(converted.served.runner, converted.served.tokenizer)
    stream.feed(tokens)
    written = "".join(stream.generate_text(6, sampling=SamplingConfig(temperature=0.0)))
    assert answer["choices"][0]["message"]["content"] == written


@pytest.mark.parametrize("end", [1, 2])
def test_a_chat_ends_at_the_model_s_own_tokens(converted, client, end):
    (choice,) = converted.chat(client, logit_bias={end: 100})["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("", "stop")
    body = {"model": "run", "prompt": TEXT, "max_tokens": 3, "temperature": 0, "logit_bias": {end: 100}}
    (choice,) = client.post("/v1/completions", json=body).json()["choices"]
    assert choice["finish_reason"] == "length"


def test_a_constrained_chat_ends_at_the_model_s_own_tokens_too(converted, client):
    pytest.importorskip("llguidance")
    form = {"structured_outputs": {"regex": "[0-9]+"}, "logit_bias": {1: 100}}
    (choice,) = converted.chat(client, **form)["choices"]
    assert (choice["finish_reason"], choice["message"]["content"].isdigit()) == ("stop", True)
    body = {"model": "run", "prompt": TEXT, "max_tokens": 6, "temperature": 0, **form}
    (choice,) = client.post("/v1/completions", json=body).json()["choices"]
    assert (choice["finish_reason"], choice["text"].isdigit()) == ("length", True)


def test_a_known_beginning_is_not_read_again(converted, client):
    first, again = converted.chat(client), converted.chat(client)
    assert again["choices"] == first["choices"]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    longer = [*CHAT, {"role": "assistant", "content": "Yes."}, {"role": "user", "content": "And then?"}]
    assert converted.chat(client, messages=longer)["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_sessions_and_forks(converted, client):
    stream = Stream(converted.served.runner, converted.served.tokenizer)
    stream.feed("The state is")
    expected = list(stream.generate(8, sampling=SamplingConfig(temperature=0.0)))

    def write(name: str, n: int, **body) -> list[int]:
        body |= {"max_tokens": n, "temperature": 0, "stream": False}
        told = client.post(f"/v1/sessions/{name}/generate", json=body).json()["tokens"]
        return [token["id"] for token in told if token["from"] == "written"]

    client.post("/v1/sessions", json={"name": "mine"})
    assert write("mine", 5, text="The state is") == expected[:5]
    end = client.get("/v1/sessions/mine").json()["position"]
    client.post("/v1/sessions/mine/fork", json={"name": "twin"})
    client.post("/v1/sessions/mine/fork", json={"name": "early", "position": end - 3})
    assert write("mine", 3) == write("twin", 3) == expected[5:]
    assert write("early", 6) == expected[2:]


def test_the_gates_are_the_decays_of_its_recurrent_layers(converted, client):
    (model,) = client.get("/v1/models").json()["data"]
    layers = LAYERS[converted.family]
    assert {layer["layer"]: layer["channels"] for layer in model["recurra"]["gates"]} == layers
    client.post("/v1/sessions", json={"name": "gates"})
    told = client.post("/v1/sessions/gates/feed", json={"text": TEXT, "details": True}).json()["tokens"]
    decays, first = converted.decays([token["id"] for token in told]), min(layers)
    n_heads = decays.shape[-1]
    for token, expected in zip(told, decays, strict=True):
        assert token["gates"]["layers"] == list(layers)
        found = torch.tensor(list(base64.b64decode(token["gates"]["magnitudes"][0])))
        assert len(found) == layers[first]
        close = 1 if converted.served.weights == "float32" else 12
        assert (found[:n_heads] - 255 * expected).abs().max() <= close


def test_the_state_grows_as_described(converted, client):
    (model,) = client.get("/v1/models").json()["data"]
    growth = model["recurra"]["state_growth"]
    assert growth
    tokens = converted.served.encode(TEXT, is_first=True)
    for n in (1, 2, 40):
        state = converted.served.read(torch.tensor([tokens[:n]]), [converted.served.start.model_state])[1][0]
        more = sum(each["bytes"] * max(0, min(n, each["tokens"] or n) - 1) for each in growth)
        assert n_bytes(state) == model["recurra"]["state_bytes"] + more
    client.post("/v1/sessions", json={"name": "grown"})
    client.post("/v1/sessions/grown/feed", json={"tokens": tokens[:41]})  # of which the last is not read yet
    assert client.get("/v1/sessions/grown").json()["state_bytes"] == n_bytes(state)


def test_the_template_goes_back_with_the_model(converted, tmp_path):
    convert_model(converted.run, tmp_path / "back", "published")
    written = (converted.run / "chat_template.jinja").read_text()
    assert written.endswith(TEMPLATE)
    assert (tmp_path / "back" / "chat_template.jinja").read_text() == written
    assert from_huggingface(tmp_path / "back").chat_template == written
    assert open_run(converted.run).folder.read_chat_template() == written
