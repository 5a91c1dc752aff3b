"""`recurra convert` holds one model at a time, in the precision of its source."""

import gc
import weakref

import pytest
import torch
from safetensors.torch import load_file
from tests.convert.published.conftest import peer
from tests.convert.published.test_published import tokenizer_of

from recurra.convert.published import _rules, folder, gguf_file
from recurra.convert.published.folder import from_huggingface, to_huggingface
from recurra.convert.published.gguf_file import to_gguf
from recurra.train import formats
from recurra.train.formats import _read_model, convert_model


def n_bytes(*tensors):
    """Return the bytes of memory behind tensors, each counted once."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A published Granite in bfloat16, without experts, and with a tokenizer; to be read."""
    path = tmp_path_factory.mktemp("source")
    model = peer("granite-dense", vocab_size=264, head_dim=8).bfloat16()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    model.save_pretrained(path)
    tokenizer_of(260).save(str(path / "tokenizer.json"))
    return path


@pytest.mark.parametrize("to", ["run", "hf", "safetensors", "gguf"])
def test_the_source_is_freed_before_the_result_is_read(to, source, tmp_path, monkeypatch):
    read, models = _read_model, []

    def watched(*where, **options):
        gc.collect()
        assert [model() for model in models] == [None] * len(models)
        portable = read(*where, **options)
        models.append(weakref.ref(portable.model))
        return portable

    monkeypatch.setattr(formats, "_read_model", watched)
    target = tmp_path / ("target.gguf" if to == "gguf" else "target.safetensors" if to == "safetensors" else "target")
    assert convert_model(source, target, to) <= (0.05 if to == "gguf" else 0)
    assert len(models) == 2
    if to != "gguf":
        assert convert_model(target, tmp_path / "back", "published") == 0
        assert len(models) == 4


@pytest.mark.parametrize("name", ["granite", "falcon-h1", "qwen3-next-experts", "zamba2", "qwen3.5-tied"])
def test_weights_are_written_without_a_second_copy(name, peers, tmp_path, monkeypatch):
    _, path = peers(name)
    to_huggingface(from_huggingface(path), tmp_path / "kept")
    portable, write, seen = from_huggingface(path), folder.write_safetensors, []
    whole = n_bytes(*portable.model.parameters())

    def watched(file, tensors, metadata):
        seen.append(n_bytes(*tensors.values(), *portable.model.parameters()))
        write(file, tensors, metadata)

    monkeypatch.setattr(folder, "write_safetensors", watched)
    to_huggingface(portable, tmp_path / "moved", in_place=True)
    assert seen[0] <= 1.01 * whole
    kept, moved = (load_file(tmp_path / name / "model.safetensors") for name in ("kept", "moved"))
    assert kept.keys() == moved.keys()
    assert all(torch.equal(kept[name], moved[name]) for name in kept)


def test_tensors_of_a_gguf_file_are_made_one_at_a_time(source, tmp_path, monkeypatch):
    portable = _read_model(source)
    to_gguf(portable, tmp_path / "kept.gguf")
    written, quantise = [], gguf_file._quantised

    def watched(name, values, wanted):
        assert [array for array in written if array() is not None] == []
        made = quantise(name, values, wanted)
        written.append(weakref.ref(made))
        return made

    monkeypatch.setattr(gguf_file, "_quantised", watched)
    to_gguf(portable, tmp_path / "moved.gguf", in_place=True)
    assert len(written) > 10
    assert (tmp_path / "moved.gguf").read_bytes() == (tmp_path / "kept.gguf").read_bytes()
    assert n_bytes(*portable.model.parameters()) == 0


@pytest.mark.parametrize("name", ["qwen3-next-experts", "zamba2-adapters", "recurrent-gemma"])
def test_weights_are_let_go_once_they_are_read(name, peers, monkeypatch):
    left, fill = [], _rules.fill

    def watched(model, weights, *others):
        fill(model, weights, *others)
        left.extend(weights)

    monkeypatch.setattr(folder, "fill", watched)
    from_huggingface(peers(name)[1])
    assert left == []


def test_runs_keep_the_precision_that_they_are_given(source, tmp_path):
    weights = load_file(source / "model.safetensors")
    convert_model(source, tmp_path / "run", "run", dtype=torch.bfloat16)
    run, wide = _read_model(tmp_path / "run").model, _read_model(source).model
    assert {parameter.dtype for parameter in wide.parameters()} == {torch.float32}
    assert run.embedding.weight.dtype == torch.bfloat16
    assert all(torch.equal(run.get_parameter(name), tensor.bfloat16()) for name, tensor in wide.named_parameters())
    assert convert_model(tmp_path / "run", tmp_path / "back", "published") == 0
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == weights.keys()
    for name, tensor in weights.items():  # the tokenizer has fewer tokens than the table rows
        torch.testing.assert_close(back[name].float(), tensor[: len(back[name])].float(), rtol=1e-6, atol=0)
    convert_model(tmp_path / "run", tmp_path / "narrow.safetensors", "safetensors")
    narrow = _read_model(tmp_path / "narrow.safetensors").model
    assert all(torch.equal(narrow.get_parameter(name), tensor) for name, tensor in run.named_parameters())


def test_the_two_checkpoints_of_a_converted_run_are_one_file(source, tmp_path):
    convert_model(source, tmp_path / "run", "run")
    one, other = (tmp_path / "run" / "checkpoints").iterdir()
    assert one.samefile(other)


def test_another_models_logits_are_refused_in_bfloat16(source, tmp_path, monkeypatch):
    read = _read_model

    def disturbed(*where, **options):
        portable = read(*where, **options)
        if where[0] != source:
            next(portable.model.parameters()).data.mul_(1.5)
        return portable

    monkeypatch.setattr(formats, "_read_model", disturbed)
    with pytest.raises(ValueError, match="its logits differ from the model's"):
        convert_model(source, tmp_path / "run", "run", dtype=torch.bfloat16)
    assert not (tmp_path / "run").exists()
