import copy
import json
from typing import NamedTuple

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from recurra.state import n_bytes, tensors
from recurra.streams.sampling import SamplingConfig
from recurra.streams.snapshot import weights_fingerprint
from recurra.streams.stream import Stream

from .conftest import VOCABULARY, build


def fed(model: nn.Module, n: int = 8) -> Stream:
    stream = Stream(model)
    stream.feed(torch.randint(VOCABULARY, (n,)))
    return stream


def same(one: Stream, other: Stream) -> bool:
    pairs = zip(tensors(one.state), tensors(other.state), strict=True)
    return (
        all(torch.equal(*pair) for pair in pairs)
        and type(one.state) is type(other.state)
        and torch.equal(one.logits, other.logits)
        and one.recent == other.recent
        and one.position == other.position
    )


# --- in memory ---


def test_later_steps_do_not_change_a_snapshot(model):
    stream = fed(model)
    twin, snapshot = stream.fork(), stream.snapshot()
    before = [tensor.clone() for tensor in tensors(snapshot.stream)]
    first = list(stream.generate(9))
    assert all(torch.equal(*pair) for pair in zip(before, tensors(snapshot.stream), strict=True))
    stream.restore(snapshot)
    assert same(stream, twin)
    assert list(stream.generate(9)) == first
    with pytest.raises(AttributeError):
        snapshot.stream = twin._now  # type: ignore[misc]


# --- in files ---


def test_a_saved_stream_goes_on_where_it_stood(any_model, tmp_path):
    model = any_model
    stream = fed(model)
    stream.save(tmp_path / "stream")
    other = Stream(model)
    other.load(tmp_path / "stream")
    assert same(other, stream)
    settings = SamplingConfig(repetition_penalty=1.4)
    assert list(other.generate(20, sampling=settings)) == list(stream.generate(20, sampling=settings))
    assert list(tmp_path.iterdir()) == [tmp_path / "stream"]


def test_a_stream_at_its_start(gateloop, tmp_path):
    Stream(gateloop).save(tmp_path / "stream")
    stream = fed(gateloop)
    stream.load(tmp_path / "stream")
    assert (stream.position, stream.state) == (0, None)
    with pytest.raises(ValueError, match="the stream is at its start"):
        _ = stream.logits


@pytest.mark.parametrize("name", ["gateloop", "s4d", "crt-gru", "transformer-xl"])
def test_the_bytes_are_the_same_however_long_the_stream_is(name, tmp_path):
    model, sizes = build(name), []
    for n_fed, position in ((10, 10), (2000, 100_000)):  # both at the start of a segment, with a full memory
        stream = fed(model, n_fed)
        stream._now = stream._now._replace(position=position)
        stream.save(tmp_path / "stream")
        sizes.append((stream.snapshot().n_bytes, (tmp_path / "stream").stat().st_size, n_bytes(stream.state)))
    assert sizes[0] == sizes[1]
    assert sizes[0][0] == sizes[0][2] + VOCABULARY * 8 + 65 * 8


class Counting(nn.Module):
    """Its state has everything that a state may hold."""

    class State(NamedTuple):
        parts: tuple
        steps: int
        share: float
        begun: bool
        nothing: None

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, tokens: Tensor, state: "Counting.State | None" = None) -> tuple[Tensor, "Counting.State"]:
        steps = tokens.shape[1] + (0 if state is None else state.steps)
        tensor = torch.full((len(tokens), 2), steps, dtype=torch.complex128) * (1 + 0.5j)
        parts = ([tensor, tensor.conj()], tensor.real.bfloat16(), tensor.real > 3)
        logits = torch.zeros(*tokens.shape, 4, dtype=torch.bfloat16) + self.weight[0].bfloat16()
        return logits, Counting.State(parts, steps, steps / 8, True, None)

    def initial_state(self, batch: int) -> "Counting.State":
        return self(torch.zeros(batch, 0, dtype=torch.int64))[1]

    def require_state(self, state: "Counting.State", batch: int) -> None:
        shapes = [tuple(tensor.shape) for tensor in tensors(state)]
        if shapes != [(batch, 2)] * 4:
            raise ValueError(f"the shapes are {shapes}; expected {batch} rows of 2")


def test_states_of_all_kinds(tmp_path):
    model = Counting().eval()
    stream = Stream(model)
    stream.feed([1, 2, 3, 0, 1])
    stream.save(tmp_path / "stream")
    other = Stream(model)
    other.load(tmp_path / "stream")
    assert same(other, stream)
    assert type(other.state.parts[0]) is list
    assert other.state[1:] == (5, 5 / 8, True, None)
    assert [type(item) for item in other.state[1:]] == [int, float, bool, type(None)]


def test_other_models_files_are_refused(tmp_path):
    stream = fed(build("gateloop"))
    stream.save(tmp_path / "stream")
    for model, message in (
        (build("gateloop", seed=1), "a LanguageModel like it with other weights"),
        (build("gateloop").float(), "other weights"),
        (build("retnet"), "mixer 'gateloop' against 'retnet'"),
        (build("crt-gru"), "LanguageModel against CompactRecurrentTransformer"),
    ):
        other = fed(model)
        before = other.fork()
        with pytest.raises(ValueError, match=rf"stream is of another model \(.*{message}"):
            other.load(tmp_path / "stream")
        assert same(other, before)


def test_damaged_and_foreign_files(gateloop, tmp_path):
    path = tmp_path / "stream"
    fed(gateloop).save(path)
    whole = path.read_bytes()
    stream = Stream(gateloop)
    for place in (3, 40, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(ValueError, match=r"stream is (damaged|another kind|a stream in format)"):
            stream.load(path)
    for content in (b"", whole[:-1], b"hello, world", whole[:100]):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="is damaged or no safetensors file"):
            stream.load(path)
    path.write_bytes(torch.tensor([]).numpy().tobytes() + (16).to_bytes(8, "little") + b'{"__metadata__":{}}'[:16])
    with pytest.raises(ValueError, match="is damaged"):
        stream.load(path)
    with pytest.raises(FileNotFoundError):
        stream.load(tmp_path / "nowhere")
    assert stream.position == 0


def test_foreign_safetensors_and_later_formats(gateloop, tmp_path):
    save_file({"weight": torch.ones(2)}, tmp_path / "stream")
    with pytest.raises(
        ValueError, match=r"is another kind of safetensors file; expected a stream that Stream\.save wrote"
    ):
        Stream(gateloop).load(tmp_path / "stream")
    content = {"format": "recurra-stream", "format_version": 2}
    save_file({"weight": torch.ones(2)}, tmp_path / "stream", metadata={"recurra": json.dumps(content)})
    with pytest.raises(ValueError, match="is a stream in format 2; expected format 1"):
        Stream(gateloop).load(tmp_path / "stream")


def test_others_can_read_the_file(gateloop, tmp_path):
    stream = fed(gateloop, 5)
    stream.save(tmp_path / "stream")
    with safe_open(tmp_path / "stream", framework="pt") as file:
        assert int(file.get_tensor("position")) == 5
        assert file.get_tensor("recent").tolist() == [-1] * 59 + list(stream.recent)
        assert torch.equal(file.get_tensor("logits"), stream.logits)
        content = json.loads(file.metadata()["recurra"])
        assert content["model"]["config"]["d_model"] == 12
        assert sorted(file.keys()) == ["logits", "position", "recent", "state.layers.0.h", "state.layers.1.h"]


# --- the identity of a model ---


def test_the_same_weights_have_the_same_fingerprint(model):
    assert weights_fingerprint(model) == weights_fingerprint(copy.deepcopy(model))


def test_one_bit_of_one_weight_makes_another(model):
    fingerprints = {weights_fingerprint(model)}
    names = list(dict(model.named_parameters()))
    for name in names:
        twin = copy.deepcopy(model)
        parameter = twin.get_parameter(name)
        with torch.no_grad():
            last = parameter.view(-1)[-1:]
            last.copy_(torch.nextafter(last, torch.full_like(last, torch.inf)))
        fingerprints.add(weights_fingerprint(twin))
    assert len(fingerprints) == 1 + len(names)


def test_rounding_names_and_shapes_make_others():
    torch.manual_seed(0)
    layer = nn.Linear(3, 4, bias=False)
    reshaped = nn.Linear(4, 3, bias=False)
    reshaped.weight = nn.Parameter(layer.weight.detach().reshape(3, 4))
    modules = [layer, reshaped, nn.Sequential(layer), copy.deepcopy(layer).double(), copy.deepcopy(layer).bfloat16()]
    assert len({weights_fingerprint(module) for module in modules}) == len(modules)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128, torch.bool, torch.int16, torch.float16])
def test_buffers_of_any_type_count(dtype):
    one, two = nn.Module(), nn.Module()
    one.register_buffer("b", torch.ones(3, dtype=dtype))
    two.register_buffer("b", torch.tensor([1, 1, 0]).to(dtype))
    assert weights_fingerprint(one) != weights_fingerprint(two)
