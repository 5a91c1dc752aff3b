"""Every mixer in one table: size, state, training speed beside a Transformer's, time of a token, export, lines of code.

    python -m benchmarks.mixers
    python -m benchmarks.mixers --only mamba gateloop --updates 20
    python -m benchmarks.mixers --calls

3 blocks of 384 channels with feed-forward networks of 1,024, 1,000 tokens, embedding and head tied. An update reads 8
sequences of 256 tokens in float32; the Transformer is the same stack with rotary attention, and takes its updates in
turn with each model in one process. So does a Transformer of the model's size: its feed-forward networks are so wide
that both have as many parameters. A token is a step of one stream, after 1,000 tokens, through the model prepared for
decoding; its time is the median of blocks of 8 tokens.

With --calls, it is the price of small calls alone: one step through a mixer of 64 channels without gradients, and 16
steps with their gradients, in microseconds beside torch.nn.GRU's on one thread; the least of many.
"""

import argparse
import inspect
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.table import cpu_name, keep
from benchmarks.timing import interleaved, median_ratio, seconds_of
from recurra import create_mixer, list_mixers
from recurra._process import keep_large_blocks
from recurra.decoding.steps import prepare
from recurra.models.language_model import LanguageModel, LanguageModelConfig
from recurra.state import detach
from recurra.train.config import OptimizerConfig
from recurra.train.optimizer import build_optimizer

N_TOKENS, D_MODEL, BATCH, LENGTH, CONTEXT = 1000, 384, 8, 256, 1000
TRANSFORMER, FEED_FORWARD = "rotary-attention", 1024
WINDOW = {"window": 256}
OPTIONS: dict[str, dict[str, Any]] = {
    "gateloop": {"n_heads": D_MODEL},
    "rotary-attention": {"n_heads": 6, **WINDOW},
    "gated-attention": {"n_heads": 6, **WINDOW},
    "mla": {"n_heads": 6, **WINDOW},
    "relative-attention": {"n_heads": 6, "segment_length": 128, "mem_len": 128},
    "gateloop-attention": {"n_heads": 6, **WINDOW},
    "reformer": {"n_heads": 6, **WINDOW},
    "hyena": WINDOW,
}
"""Where the defaults are not what is compared: one head a channel, and windows as long as the sequences."""


def build(name: str, feed_forward: int = FEED_FORWARD) -> LanguageModel:
    torch.manual_seed(0)
    config = LanguageModelConfig(
        *(N_TOKENS, None, 3, D_MODEL, feed_forward),
        mixer=name,
        mixer_options=OPTIONS.get(name, {}),
        tie_embeddings=True,
    )
    return LanguageModel(config)


def size_of(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def transformer_of(size: int) -> LanguageModel:
    """The Transformer with about as many parameters, by the width of its feed-forward networks."""
    narrow, wide = size_of(build(TRANSFORMER)), size_of(build(TRANSFORMER, FEED_FORWARD + 1))
    return build(TRANSFORMER, FEED_FORWARD + round((size - narrow) / (wide - narrow)))


class Trained:
    """A model that takes updates."""

    def __init__(self, model: LanguageModel) -> None:
        self.model = model.train()
        self.optimizer = build_optimizer(self.model, OptimizerConfig(learning_rate=1e-4))
        self.tokens = torch.randint(N_TOKENS, (BATCH, LENGTH + 1))

    def update(self) -> None:
        self.model.loss(self.tokens[:, :-1], self.tokens[:, 1:])[0].mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def state_bytes(state: Any) -> int:
    if isinstance(state, torch.Tensor):
        return state.numel() * state.element_size()
    return sum(map(state_bytes, state)) if isinstance(state, tuple) else 0


@torch.inference_mode()
def decoded(model: LanguageModel) -> tuple[float, int]:
    """Milliseconds of a token, and the bytes of a stream's state then."""
    fast = prepare(model.eval(), "float32")
    _, state = model(torch.randint(N_TOKENS, (1, CONTEXT)))
    token, times = torch.zeros(1, 1, dtype=torch.int64), []
    for _ in range(12):
        start = time.perf_counter()
        for _ in range(8):
            _, state = fast(token, state)
        times.append((time.perf_counter() - start) / 8)
    return 1e3 * statistics.median(times[2:]), state_bytes(detach(state))


def measured(name: str, n_updates: int) -> dict[str, Any]:
    ours = Trained(build(name))
    models = {"ours": ours, "transformer": Trained(build(TRANSFORMER))}
    models["of its size"] = Trained(transformer_of(size_of(ours.model)))
    seconds = interleaved({name: trained.update for name, trained in models.items()}, rounds=n_updates)
    milliseconds, size = decoded(ours.model)
    mixer = ours.model.blocks[0].mixer
    return {
        "parameters": size_of(mixer),  # type: ignore[arg-type]
        "state": size,
        "speed": median_ratio(seconds["transformer"], seconds["ours"]),
        "speed_at_its_size": median_ratio(seconds["of its size"], seconds["ours"]),
        "tokens_per_second": BATCH * LENGTH / statistics.median(seconds["ours"]),
        "milliseconds": milliseconds,
        "not_exportable": mixer.why_not_exportable(),  # type: ignore[operator, union-attr]
        "lines": len(Path(inspect.getfile(type(mixer))).read_text().splitlines()),
    }


def microseconds(call: Callable[[], Any], rounds: int = 300) -> float:
    """The least time of a call, of `rounds` after 20 unmeasured ones."""
    return 1e6 * min([seconds_of(call) for _ in range(20 + rounds)][20:])


def calls(names: list[str], d_model: int = 64) -> Table:
    """The price of small calls."""
    torch.set_num_threads(1)
    step, steps = torch.randn(1, 1, d_model), torch.randn(1, 16, d_model, requires_grad=True)
    table = Table("mixer", "us a step", "us of 16 steps, forward and backward")
    gru = torch.nn.GRU(d_model, d_model, batch_first=True)
    for name, mixer in (("torch.nn.GRU", gru), *((name, create_mixer(name, d_model)) for name in names)):
        state = detach(mixer(steps)[1])
        with torch.no_grad():
            alone = microseconds(partial(mixer, step, state))
        table.add_row(name, f"{alone:.0f}", f"{microseconds(partial(_update, mixer, steps)):.0f}")
    return table


def _update(mixer: torch.nn.Module, steps: torch.Tensor) -> None:
    mixer(steps)[0].sum().backward()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list_mixers(), default=list_mixers())
    parser.add_argument("--updates", type=int, default=7, help="timed updates of each model (default: 7)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--calls", action="store_true", help="time small calls instead")
    arguments = parser.parse_args()
    if arguments.calls:
        Console(width=140).print(calls(arguments.only))
        return
    torch.set_num_threads(arguments.threads)
    keep_large_blocks()
    results = {name: measured(name, arguments.updates) for name in track(arguments.only, transient=True)}
    columns: tuple[str, ...] = ("parameters", "state, bytes", "tokens/s", "over the Transformer's")
    columns += ("over one's of its size", "ms a token", "export", "lines")
    table = Table("mixer", *columns)
    for name, found in results.items():
        table.add_row(
            name,
            f"{found['parameters']:,}",
            f"{found['state']:,}",
            f"{found['tokens_per_second']:,.0f}",
            f"{found['speed']:.2f}",
            f"{found['speed_at_its_size']:.2f}",
            f"{found['milliseconds']:.2f}",
            "no" if found["not_exportable"] else "yes",
            str(found["lines"]),
        )
    console = Console(width=140)
    console.print(table)
    for name, found in results.items():
        if found["not_exportable"]:
            console.print(f"{name}: {found['not_exportable']}")
    path = Path("runs/benchmarks-mixers.json")
    keep(path, {"cpu": cpu_name(), "threads": arguments.threads, "mixers": results})


if __name__ == "__main__":
    main()
