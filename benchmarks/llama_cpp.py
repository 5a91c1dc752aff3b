"""One token at a time beside llama.cpp: our GateLoop and Mamba, and its GPT-2 and Mamba, all with random weights.

    make llama
    python -m benchmarks.llama_cpp --peer .venv-llama/bin/python

llama.cpp runs GPT-2 of 124M parameters or Mamba of 130M, in F32, Q8_0 and Q4_0, from files that are written on the
first use. Ours are the GateLoop of `benchmarks.decoding`, 88M parameters, and Mamba of 130M, with weights kept as each
of `recurra.decoding.linear.DTYPES`. Both sides take blocks of greedy steps in turn, on as many threads. A step of ours
is timed with the choice of the token, and llama.cpp's times are its own. The bytes of the weights are those that a step
reads, so without tables of positions, and of embeddings where they are not the head.

llama.cpp comes as the wheel xllamacpp, which may be built for older vector units than this CPU has: the result says
which it uses.
"""

import argparse
import itertools
import json
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from benchmarks.decoding import gateloop
from benchmarks.table import cpu_name, keep
from benchmarks.timing import seconds_of
from recurra._process import keep_large_blocks
from recurra.decoding.linear import DTYPES
from recurra.decoding.packing import pack_linear_layers
from recurra.decoding.steps import prepare
from recurra.models.language_model import LanguageModel, LanguageModelConfig

PEER = Path(__file__).with_name("llama_cpp_peer.py")
QUANTISED = ("F32", "Q8_0", "Q4_0")
CONTEXTS, PROMPT = (128, 8192), 2048
STEPS = 32
"""In a block: timed after one that is not."""


def mamba() -> LanguageModel:
    torch.manual_seed(0)
    options = {"d_state": 16, "d_conv": 4, "expand": 2, "dt_rank": 48}
    config = LanguageModelConfig(
        50280, None, 24, 768, 0, mixer="mamba", mixer_options=options, norm="rms", biases=False, tie_embeddings=True
    )
    return LanguageModel(config).eval()


def little(kind: str) -> LanguageModel:
    """Stand-ins for a dry run."""
    torch.manual_seed(0)
    mixer = {"GateLoop": "gateloop", "Mamba": "mamba"}[kind]
    return LanguageModel(LanguageModelConfig(300, None, 1, 32, 32, mixer=mixer, tie_embeddings=True)).eval()


class Peer:
    """llama.cpp with a model, in a process of its own environment."""

    def __init__(self, python: str, file: Path, threads: int, context: int, slots: int = 1) -> None:
        self.name, self.tokens = file.stem, 300
        command = [python, str(PEER), "serve", str(file), str(threads), str(context), str(slots)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )

    def ask(self, prompt: list[int], predict: int, keep: bool, streams: int = 1) -> dict[str, float]:
        """Read a prompt and predict tokens, in some streams at once; give llama.cpp's own times for the last of them.

        Raises:
            RuntimeError: it ended instead.
        """
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(
            json.dumps({"prompt": prompt, "predict": predict, "keep": keep, "streams": streams}) + "\n"
        )
        self.process.stdin.flush()
        if line := self.process.stdout.readline():
            found: dict[str, float] = json.loads(line)
            return found
        raise RuntimeError(f"{self.name}: llama.cpp ended with status {self.process.wait()}")

    def block(self, prompt: list[int]) -> list[float]:
        """Milliseconds a token of a block; the first of its tokens comes with the prompt, and takes no step."""
        found = self.ask(prompt, STEPS + 1, keep=True)
        return [found["predicted_ms"] / (found["predicted_n"] - 1)]

    def streams(self, prompt: list[int], count: int) -> float:
        """Tokens/s that streams write at once, without the time that their prompts take."""
        short, long = (self.ask(prompt, predict, keep=False, streams=count)["wall_ms"] for predict in (1, STEPS + 1))
        return 1e3 * count * STEPS / (long - short)

    def prefill(self, prompt: list[int]) -> float:
        found = self.ask(prompt, 1, keep=False)
        return found["prompt_ms"] * len(prompt) / found["prompt_n"]

    def __enter__(self) -> "Peer":
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(20)


class Ours:
    """One of our models in a form for decoding, with a context behind it."""

    def __init__(self, model: nn.Module, form: nn.Module, context: int) -> None:
        self.form, self.token = form, torch.zeros(1, 1, dtype=torch.int64)
        self.state: Any = None
        for piece in torch.randint(300, (1, context)).split(2048, dim=1):
            _, self.state = model(piece, self.state)

    def step(self) -> None:
        logits, self.state = self.form(self.token, self.state)
        self.token = logits[:, -1].argmax(-1, keepdim=True)

    def block(self) -> list[float]:
        self.step()
        start = time.perf_counter()
        for _ in range(STEPS):
            self.step()
        return [1e3 * (time.perf_counter() - start) / STEPS]


def weight_bytes(laid_out: nn.Module) -> int:
    """The bytes of weights that a step reads: every tensor once, without an embedding that is not the head."""
    found = {}
    for name, tensor in [*laid_out.named_parameters(), *laid_out.named_buffers()]:
        if not name.startswith("embedding."):
            found[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
    return sum(found.values())


def write_files(python: str, architecture: str, folder: Path, dry: bool) -> dict[str, int]:
    """Write the models that are missing; give the bytes of their weights."""
    sizes_file = folder / f"{architecture}.json"
    if sizes_file.exists():
        known: dict[str, int] = json.loads(sizes_file.read_text())
        return known
    sizes = {}
    for number in QUANTISED:
        command = [python, str(PEER), "write", architecture, number, str(folder / f"{architecture}-{number}.gguf")]
        ended = subprocess.run([*command, *(["--dry"] if dry else [])], check=True, stdout=subprocess.PIPE, text=True)
        sizes[number] = int(ended.stdout)
    sizes_file.write_text(json.dumps(sizes))
    return sizes


def our_models(names: list[str], dry: bool) -> Iterator[tuple[str, LanguageModel]]:
    full: dict[str, Callable[[], LanguageModel]] = {"GateLoop": gateloop, "Mamba": mamba}
    for name in names:
        yield name, little(name) if dry else full[name]()


@torch.inference_mode()
def measure(arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Time everything in turn; give each form's milliseconds a token by context, and for a prompt, and its bytes."""
    dry, folder = arguments.dry, arguments.models
    folder.mkdir(parents=True, exist_ok=True)
    found: dict[str, dict[str, Any]] = {}
    blocks: dict[tuple[str, int], Callable[[], list[float]]] = {}
    prompt = torch.randint(300, (1, arguments.prompt))
    with ExitStack() as stack:
        for name, model in our_models(arguments.ours, dry):
            for number in arguments.numbers:
                row, form = f"our {name}, {number}", prepare(model, number)
                found[row] = {"bytes": weight_bytes(pack_linear_layers(model, number))}
                for context in arguments.contexts:
                    blocks[row, context] = Ours(model, form, context).block
            if arguments.prompt:
                found[f"our {name}, {arguments.numbers[0]}"]["prefill"] = _our_prefill(model, prompt)
        for architecture in arguments.theirs:
            sizes = write_files(arguments.peer, architecture, folder, dry)
            for number in arguments.quantised:
                row, file = f"llama.cpp {architecture}, {number}", folder / f"{architecture}-{number}.gguf"
                longest = max(*arguments.contexts, arguments.prompt) + 2 * STEPS
                peer = stack.enter_context(Peer(arguments.peer, file, arguments.threads, longest))
                found[row] = {"bytes": sizes[number]}
                for context in arguments.contexts:
                    read = torch.randint(300, (context,)).tolist()
                    blocks[row, context] = lambda peer=peer, read=read: peer.block(read)  # type: ignore[misc]
                if arguments.prompt:
                    found[row]["prefill"] = peer.prefill(prompt[0].tolist())
        # one context after the other: llama.cpp reads a prompt again unless it was the last one
        for context, turn in itertools.product(arguments.contexts, range(arguments.rounds + 1)):
            for (row, _), block in ((key, block) for key, block in blocks.items() if key[1] == context):
                times = block()
                if turn:  # the first round warms up
                    found[row].setdefault(str(context), []).extend(times)
    return found


def _our_prefill(model: LanguageModel, prompt: torch.Tensor) -> float:
    return 1e3 * [seconds_of(lambda: model.head(model.hidden(prompt)[0][:, -1])) for _ in range(2)][1]


def show(found: dict[str, dict[str, Any]], contexts: list[int], prompt: int) -> None:
    columns = [word for context in contexts for word in (f"ms at {context:,}", "tokens/s", "GB/s")]
    table = Table("", "MB of weights", *columns, f"prefill of {prompt:,}: tokens/s")
    for row, values in found.items():
        cells = []
        for context in contexts:
            middle = statistics.median(values[str(context)])
            cells += [f"{middle:.2f}", f"{1e3 / middle:.0f}", f"{values['bytes'] / middle / 1e6:.1f}"]
        prefill = f"{1e3 * prompt / values['prefill']:,.0f}" if "prefill" in values else ""
        table.add_row(row, f"{values['bytes'] / 1e6:.1f}", *cells, prefill)
    Console(width=150).print(table)


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", default=".venv-llama/bin/python", help="Python with xllamacpp and gguf")
    parser.add_argument("--models", type=Path, default=Path("runs/gguf"), help="folder of GGUF files")
    parser.add_argument("--ours", nargs="*", default=["GateLoop", "Mamba"], choices=["GateLoop", "Mamba"])
    parser.add_argument("--theirs", nargs="*", default=["gpt2", "mamba"], choices=["gpt2", "mamba"])
    parser.add_argument("--numbers", nargs="+", default=list(DTYPES), choices=DTYPES, help="of our weights")
    parser.add_argument("--quantised", nargs="+", default=list(QUANTISED), choices=QUANTISED, help="of theirs")
    parser.add_argument("--contexts", nargs="+", type=int, default=list(CONTEXTS), help="tokens already read")
    parser.add_argument("--prompt", type=int, default=PROMPT, help="tokens read at once; 0: none (default: 2048)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5, help=f"blocks of {STEPS} steps of each (default: 5)")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks-llama-cpp.json"))
    parser.add_argument("--dry", action="store_true", help="tiny models")
    arguments = parser.parse_args(words)
    torch.set_num_threads(arguments.threads)
    keep_large_blocks()
    found = measure(arguments)
    show(found, arguments.contexts, arguments.prompt)
    info = subprocess.run([arguments.peer, str(PEER), "info"], check=True, stdout=subprocess.PIPE, text=True).stdout
    about = json.loads(info.splitlines()[-1]) if info else {}
    print(about.get("system", ""))
    result = {"cpu": cpu_name(), "torch": torch.__version__, "threads": arguments.threads, **about, "results": found}
    keep(arguments.out, result)


if __name__ == "__main__":
    main()
