"""`recurra convert`: words in, a model in another format and a line about it out."""

from functools import partialmethod
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.cli.conftest import failure, train_on_text

from recurra.cli import main
from recurra.train.formats import _format_of


@pytest.fixture(scope="module")
def workplace(tmp_path_factory) -> Path:
    """A folder with a corpus and a finished run."""
    folder = tmp_path_factory.mktemp("convert")
    model = "{n_layer: 1, d_model: 8, n_heads: 2, d_channel_mixing: 8}"
    train_on_text(folder, "run", "text-crt", "vocabulary: words", model)
    return folder


@pytest.fixture(autouse=True)
def there(monkeypatch, workplace):
    monkeypatch.chdir(workplace)


def test_the_name_of_a_file_says_its_format(capsys, tmp_path):
    target = str(tmp_path / "model.safetensors")
    assert main(["convert", "run", target]) == 0
    assert capsys.readouterr().out == f"wrote {target}; the logits of both differ by 0.0e+00 at most\n"
    assert _format_of(Path(target)) == "safetensors"
    assert "which has the format safetensors already" in failure(capsys, "convert", target, target, "--force")
    assert "names no format; expected --to run or --to hf" in failure(
        capsys, "convert", target, str(tmp_path / "again")
    )
    assert main(["convert", target, str(tmp_path / "again"), "--to", "run"]) == 0
    assert "which exists; expected another name" in failure(capsys, "convert", "run", target)
    assert main(["convert", "run", target, "--force", "--checkpoint", "last"]) == 0
    assert main(["convert", "run", target, "--force", "--dtype", "bfloat16"]) == 0
    assert {tensor.dtype for tensor in load_file(target).values()} == {torch.bfloat16}


def test_weights_that_an_older_model_left_are_noticed(capsys, tmp_path, monkeypatch):
    """The older ones are in one file, which is read first, and the new ones in shards."""
    transformers = pytest.importorskip("transformers", reason="needs the extra hf: pip install recurra[hf]")
    target, save = str(tmp_path / "hf"), transformers.PreTrainedModel.save_pretrained
    assert main(["convert", "run", target, "--to", "hf"]) == 0
    older = {name: 2 * tensor for name, tensor in load_file(tmp_path / "hf" / "model.safetensors").items()}
    save_file(older, tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
    in_shards = partialmethod(save, max_shard_size="1KB")
    monkeypatch.setattr(transformers.PreTrainedModel, "save_pretrained", in_shards)
    assert "its logits differ from the model's by" in failure(capsys, "convert", "run", target, "--to", "hf", "--force")


def test_a_converted_run_is_scored_and_generates_and_is_not_resumed(capsys, tmp_path):
    file, other = str(tmp_path / "model.safetensors"), str(tmp_path / "run")
    assert main(["convert", "run", file]) == 0
    assert main(["convert", file, other, "--to", "run"]) == 0
    outputs = []
    for run in ("run", other):
        assert main(["eval", run]) == 0
        capsys.readouterr()
        assert main(["generate", run, "--temperature", "0"]) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1]
    assert "expected a checkpoint that training can continue from" in failure(capsys, "train", "--resume", other)


@pytest.mark.parametrize("ending", [".safetensors", "-folder"])
def test_a_run_over_bytes_is_converted_with_byte_pairs(capsys, tmp_path, text_recipe, ending):
    run, file, other = (str(tmp_path / name) for name in ("bytes", f"model{ending}", "again"))
    assert main(["train", str(text_recipe), "--data.vocabulary", "bytes", "--run-dir", run]) == 0
    if ending == "-folder":
        pytest.importorskip("transformers")
    assert main(["convert", run, file, *(["--to", "hf"] if ending == "-folder" else [])]) == 0
    assert main(["convert", file, other, "--to", "run"]) == 0
    outputs = []
    for folder in (run, other):
        assert main(["eval", folder]) == 0
        capsys.readouterr()
        assert main(["generate", folder, "--temperature", "0", "--prompt", "ca"]) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1]
