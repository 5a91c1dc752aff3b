"""One trained run in all its forms: test perplexity as a run, from Hugging Face, from ONNX, and packed for decoding.

    python -m benchmarks.forms RUN  # without the exported forms; with them:
    recurra export hf RUN FOLDER
    recurra export onnx RUN FILE.onnx
    recurra export onnx RUN INT8.onnx --int8
    python -m benchmarks.forms RUN FOLDER FILE.onnx INT8.onnx --data.path CORPUS

Each form reads the test split with the state carried along it, as `recurra eval` does.
"""

import argparse
import math
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from benchmarks.table import keep
from recurra import open_run
from recurra.cli._arguments import split_overrides
from recurra.decoding.linear import DTYPES
from recurra.decoding.packing import pack_linear_layers
from recurra.train.evaluate import evaluate


class Form(nn.Module):
    """A form of a model under the one contract; the parameter says only which device it is on."""

    def __init__(self) -> None:
        super().__init__()
        self.device = nn.Parameter(torch.zeros(()))


class FromHuggingFace(Form):
    def __init__(self, folder: str) -> None:
        from transformers import AutoModelForCausalLM

        import recurra.convert.huggingface  # noqa: F401

        super().__init__()
        self.model = AutoModelForCausalLM.from_pretrained(folder)

    def forward(self, tokens: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        out = self.model(tokens, past_key_values=state, use_cache=True)
        return out.logits, out.past_key_values


class FromOnnx(Form):
    def __init__(self, file: Path) -> None:
        from recurra.convert.export.onnx_file import OnnxModel

        super().__init__()
        self.model = OnnxModel(file, threads=torch.get_num_threads())

    def forward(self, tokens: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        logits, state = self.model(tokens.numpy(), state)
        return torch.from_numpy(logits), state


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", help="the folder of a run over text")
    parser.add_argument("folder", nargs="?", help="what `recurra export hf` wrote")
    parser.add_argument("files", type=Path, nargs="*", help="what `recurra export onnx` wrote")
    own, overrides = split_overrides(sys.argv[1:])
    arguments = parser.parse_args(own)
    run = open_run(arguments.run, overrides=overrides)
    forms: dict[str, nn.Module] = {"recurra": run.model}
    if arguments.folder is not None:
        forms["Hugging Face"] = FromHuggingFace(arguments.folder)
    forms |= {file.name: FromOnnx(file) for file in arguments.files}
    forms |= {f"for decoding, {numbers}": pack_linear_layers(run.model, numbers) for numbers in DTYPES}
    table = Table("form", "test perplexity", "over the run's", "tokens/s")
    results: dict[str, float] = {}
    for name, form in forms.items():
        scores = evaluate(form, run.data.source("test"))
        results[name] = math.exp(scores.loss)
        ratio = results[name] / results["recurra"]
        table.add_row(name, f"{results[name]:.4f}", f"{ratio:.6f}", f"{scores.tokens_per_second:,.0f}")
    Console().print(table)
    keep(Path("runs/benchmarks-forms.json"), results)


if __name__ == "__main__":
    main()
