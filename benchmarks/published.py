"""Published architectures here and in transformers' own classes: the same random weights, side by side.

    python -m benchmarks.published
    python -m benchmarks.published --only mamba2 --rounds 3

Reading a prompt of 2,048 tokens, one token at a time after it, and the gradients of a step of 1,024 tokens, batch 1, in
float32 on 2 threads. Each pair takes turns; the ratio is transformers' time over ours, the median over the rounds.
transformers runs what it runs on a CPU where no CUDA extension can be installed. Logits are compared first.

Mamba's gradients are measured only if asked for (--only mamba --parts gradients): transformers takes minutes a call.
"""

import argparse
import inspect
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from benchmarks.table import Row, save, show
from benchmarks.timing import interleaved, median_ratio
from recurra.convert.published.folder import from_huggingface
from recurra.decoding.steps import prepare
from recurra.train._process import keep_large_blocks

PROMPT, STEP, TOKENS = 2048, 1024, 16
WANTED = 3.0
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba": ("Mamba", {"hidden_size": 768, "num_hidden_layers": 24, "vocab_size": 50280}),  # mamba-130m
    "mamba2": (
        "Mamba2",  # mamba2-130m
        {
            "hidden_size": 768,
            "num_hidden_layers": 24,
            "vocab_size": 50288,
            "num_heads": 24,
            "n_groups": 1,
            "tie_word_embeddings": True,
        },
    ),
}


def pair(name: str) -> tuple[nn.Module, nn.Module]:
    """One model as transformers has it and as we have it, by way of a folder."""
    import transformers
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    kind, settings = SHAPES[name]
    torch.manual_seed(0)
    peer = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**settings)).eval()
    with tempfile.TemporaryDirectory() as folder:
        peer.save_pretrained(folder)
        ours = from_huggingface(Path(folder)).model
    tokens = torch.randint(settings["vocab_size"], (1, 64))
    with torch.inference_mode():
        expected = peer(tokens, use_cache=False).logits
        difference = (expected - ours(tokens)[0]).abs().max() / expected.abs().max()
    print(
        f"{name}: {sum(p.numel() for p in ours.parameters()) / 1e6:.0f}M parameters, "
        f"logits differ by {difference:.0e} of the largest"
    )
    return peer, ours


def prefill(peer: nn.Module, ours: nn.Module, tokens: torch.Tensor) -> dict[str, Callable[[], object]]:
    return {
        "transformers": torch.inference_mode()(lambda: peer(tokens, use_cache=True, logits_to_keep=1)),
        "recurra": torch.inference_mode()(lambda: ours.head(ours.hidden(tokens)[0][:, -1:])),  # type: ignore[operator]
    }


def decode(peer: nn.Module, ours: nn.Module, tokens: torch.Tensor) -> dict[str, Callable[[], object]]:
    """TOKENS tokens, one at a time."""
    fast = prepare(ours, "float32")
    with torch.inference_mode():
        cache: Any = peer(tokens, use_cache=True)
        cache = cache.past_key_values if cache.get("past_key_values") is not None else cache.cache_params
        _, state = ours(tokens)
    token, takes = tokens[:, :1], inspect.signature(peer.forward).parameters
    name = "past_key_values" if "past_key_values" in takes else "cache_params"

    @torch.inference_mode()
    def theirs() -> None:
        for _ in range(TOKENS):
            peer(token, use_cache=True, **{name: cache})

    @torch.inference_mode()
    def mine() -> None:
        nonlocal state
        for _ in range(TOKENS):
            _, state = fast(token, state)

    return {"transformers": theirs, "recurra": mine}


def gradients(peer: nn.Module, ours: nn.Module, tokens: torch.Tensor) -> dict[str, Callable[[], object]]:
    inputs, targets = tokens[:, :STEP], tokens[:, 1 : STEP + 1]

    def theirs() -> None:
        logits = peer(inputs, use_cache=False).logits
        functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
        peer.zero_grad()

    def mine() -> None:
        ours.loss(inputs, targets)[0].mean().backward()  # type: ignore[operator]
        ours.zero_grad()

    return {"transformers": theirs, "recurra": mine}


PARTS = {
    "prompt": (f"prompt of {PROMPT} tokens", prefill),
    "tokens": (f"{TOKENS} tokens, one at a time", decode),
    "gradients": (f"gradients of {STEP} tokens", gradients),
}
SLOW = {("mamba", "gradients")}
"""Left out unless asked for: transformers walks through time in Python."""


def parts_of(name: str, asked: list[str] | None) -> list[str]:
    return asked or [part for part in PARTS if (name, part) not in SLOW]


def measure(names: list[str], asked: list[str] | None, rounds: int) -> Iterator[Row]:
    for name in names:
        peer, ours = pair(name)
        tokens = torch.randint(SHAPES[name][1]["vocab_size"], (1, PROMPT))
        for what, make in (PARTS[part] for part in parts_of(name, asked)):
            seconds = interleaved(make(peer, ours, tokens), rounds=rounds, warm_up=1)
            ratio = median_ratio(seconds["transformers"], seconds["recurra"])
            yield Row(name, f"{what}, transformers", seconds["transformers"], 1.0)
            yield Row(name, f"{what}, recurra", seconds["recurra"], ratio, WANTED, "at least")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--parts", nargs="+", choices=PARTS, help="default: all but Mamba's gradients")
    parser.add_argument("--rounds", type=int, default=3, help="timed calls of each (default: 3)")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    keep_large_blocks()
    warnings.filterwarnings("ignore")
    title = "published architectures, transformers' time over ours"
    save(
        Path("runs/benchmarks-published.json"),
        {title: show(title, measure(arguments.only, arguments.parts, arguments.rounds))},
    )


if __name__ == "__main__":
    main()
