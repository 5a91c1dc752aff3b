"""Speed of published architectures in Recurra, llama.cpp and transformers, with the same random weights.

    make llama
    python -m benchmarks.published
    python -m benchmarks.published --only granite-4.0-h-350m --contexts 128 --prompts 512

Each model decodes one token at a time after each context (in interleaved blocks of 16 greedy steps), reads prompts, and
decodes 16 concurrent streams. Weights are int8 and int4 in Recurra, Q8_0 and Q4_0 in llama.cpp (from files exported by
Recurra), and bfloat16 in transformers, without CUDA extensions. transformers runs only contexts of up to --most tokens.
llama.cpp times its own prompts and steps; its wheel may be built for older vector instructions than this CPU has.
RWKV-7 has no class in transformers.
"""

import argparse
import gc
import json
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from benchmarks.llama_cpp import Peer
from benchmarks.table import cpu_name
from benchmarks.timing import seconds_of
from recurra.convert.portable import PortableModel
from recurra.convert.published.folder import from_huggingface
from recurra.convert.published.gguf_file import to_gguf
from recurra.data.tokenizers import BytePairEncoding
from recurra.decoding.steps import prepare
from recurra.models.language_model import LanguageModel, LanguageModelConfig
from recurra.state import n_bytes
from recurra.train._process import keep_large_blocks

STEPS, STREAMS = 16, 16
ROPE = {"rope_type": "default", "rope_theta": 10000000.0, "partial_rotary_factor": 0.25}
_GRANITE: dict[str, Any] = {
    "vocab_size": 100352,
    "mamba_d_state": 128,
    "num_local_experts": 0,
    "num_key_value_heads": 4,
}
_GRANITE |= {"embedding_multiplier": 12, "residual_multiplier": 0.246, "tie_word_embeddings": True}
_GRANITE |= {"num_attention_heads": 12, "attention_multiplier": 0.015625, "logits_scaling": 3, "pad_token_id": None}


def granite(d_model: int, n_layer: int, attends: list[int], d_hidden: int) -> dict[str, Any]:
    kinds = ["full_attention" if layer in attends else "linear_attention" for layer in range(n_layer)]
    return {
        **_GRANITE,
        "hidden_size": d_model,
        "num_hidden_layers": n_layer,
        "layer_types": kinds,
        "intermediate_size": d_hidden,
        "shared_intermediate_size": d_hidden,
        "mamba_n_heads": 48,
    }


def lfm2(d_model: int, n_heads: int, d_hidden: int) -> dict[str, Any]:
    return {
        "hidden_size": d_model,
        "num_hidden_layers": 16,
        "num_attention_heads": n_heads,
        "num_key_value_heads": 8,
        "intermediate_size": d_hidden,
        "vocab_size": 65536,
        "full_attn_idxs": [2, 5, 8, 10, 12, 14],
        "block_auto_adjust_ff_dim": False,
        "pad_token_id": None,
    }


SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "granite-4.0-h-350m": ("GraniteMoeHybrid", granite(768, 32, [10, 13, 17, 27], 2048)),
    "lfm2-350m": ("Lfm2", lfm2(1024, 16, 4608)),
    "rwkv7-0.4b": ("", {"d_model": 1024, "n_layer": 24, "vocab_size": 65536}),
    "falcon-h1-0.5b": (
        "FalconH1",
        {
            "hidden_size": 1024,
            "num_hidden_layers": 36,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "intermediate_size": 2048,
            "vocab_size": 32784,
            "mamba_d_ssm": 1536,
            "mamba_n_heads": 24,
            "mamba_d_state": 128,
            "pad_token_id": None,
        },
    ),
    "qwen3.5-0.8b": (
        "Qwen3_5",
        {
            "hidden_size": 1024,
            "num_hidden_layers": 24,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "intermediate_size": 3584,
            "vocab_size": 248320,
            "linear_num_value_heads": 16,
            "linear_num_key_heads": 16,
            "rope_parameters": ROPE,
            "tie_word_embeddings": True,
        },
    ),
    "lfm2-1.2b": ("Lfm2", lfm2(2048, 32, 8192)),
    "mamba2-1.3b": (
        "Mamba2",
        {
            "hidden_size": 2048,
            "num_hidden_layers": 48,
            "num_heads": 64,
            "n_groups": 1,
            "vocab_size": 50288,
            "tie_word_embeddings": True,
        },
    ),
    "granite-4.0-h-1b": ("GraniteMoeHybrid", granite(1536, 40, [5, 15, 25, 35], 4096)),
    "dry": ("GraniteMoeHybrid", granite(192, 2, [1], 64) | {"vocab_size": 320, "mamba_n_heads": 6}),
}
"""transformers' class and settings, in the sizes of the models of these names."""
TRANSFORMERS = "transformers bfloat16"
NUMBERS = {"int8": "Q8_0", "int4": "Q4_0"}


def rwkv7(d_model: int, n_layer: int, vocab_size: int) -> LanguageModel:
    torch.manual_seed(0)
    mixers = ["rwkv7", "rwkv7-channel-mixing"] * n_layer
    shape: dict[str, Any] = {"norm": "layer", "norm_epsilon": 1e-5, "biases": False, "embedding_norm": True}
    return LanguageModel(LanguageModelConfig(vocab_size, None, 2 * n_layer, d_model, 0, mixer=mixers, **shape)).eval()


def pair(name: str) -> tuple[nn.Module | None, LanguageModel]:
    """Return transformers' model, in bfloat16, and Recurra's, converted from its folder."""
    import transformers
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    kind, settings = SHAPES[name]
    if not kind:
        return None, rwkv7(**settings)
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}ForCausalLM").config_class(**settings)
    torch.set_default_dtype(torch.bfloat16)
    try:
        peer = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    finally:
        torch.set_default_dtype(torch.float32)
    with tempfile.TemporaryDirectory() as folder:
        peer.save_pretrained(folder)
        ours: Any = from_huggingface(Path(folder)).model
    return peer, ours


class Ours:
    """Recurra's prepared model after a context, with one or more streams."""

    def __init__(self, form: nn.Module, context: int, streams: int = 1) -> None:
        self.form, self.token, self.state = form, torch.zeros(streams, 1, dtype=torch.int64), None
        for piece in torch.randint(300, (streams, context)).split(1024, dim=1):
            _, self.state = form(piece, self.state)

    @torch.inference_mode()
    def block(self) -> float:
        """Return milliseconds per step."""
        start = time.perf_counter()
        for _ in range(STEPS):
            logits, self.state = self.form(self.token, self.state)
            self.token = logits[:, -1].argmax(-1, keepdim=True)
        return 1e3 * (time.perf_counter() - start) / STEPS


class Theirs:
    """transformers' model after a context."""

    def __init__(self, model: nn.Module, context: int) -> None:
        self.model, self.token = model, torch.zeros(1, 1, dtype=torch.int64)
        with torch.inference_mode():
            self.cache = _cache(model(torch.randint(300, (1, context)), use_cache=True, logits_to_keep=1))

    @torch.inference_mode()
    def block(self) -> float:
        start = time.perf_counter()
        for _ in range(STEPS):
            logits = self.model(self.token, use_cache=True, **self.cache).logits
            self.token = logits[:, -1].argmax(-1, keepdim=True)
        return 1e3 * (time.perf_counter() - start) / STEPS


def _cache(output: Any) -> dict[str, Any]:
    names = ("past_key_values", "cache_params")
    return next({name: output[name]} for name in names if output.get(name) is not None)


Blocks = dict[str, Callable[[], float]]


class Sides:
    """One model in all three libraries."""

    def __init__(self, name: str, arguments: argparse.Namespace, stack: ExitStack) -> None:
        self.peer, self.ours = pair(name)
        self.most = arguments.most
        self.forms = {f"recurra {number}": prepare(self.ours, number) for number in arguments.numbers}
        self.llama: dict[str, Peer] = {}
        if not Path(arguments.peer).exists():
            print(f"{arguments.peer} does not exist: without llama.cpp (make llama)")
            return
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=arguments.folder)))
        tokenizer = BytePairEncoding.train(["a cat and a dog"], 260)
        longest = max(*arguments.contexts, *arguments.prompts, STREAMS * 256) + 4 * STEPS
        for kind in (NUMBERS[number] for number in arguments.numbers):
            file = folder / f"{name}-{kind}.gguf"
            to_gguf(PortableModel(self.ours, tokenizer), file, dtype=kind.lower())  # type: ignore[arg-type]
            peer = Peer(arguments.peer, file, arguments.threads, longest, STREAMS)
            self.llama[f"llama.cpp {kind}"] = stack.enter_context(peer)

    def prompts(self, tokens: torch.Tensor) -> dict[str, float]:
        """Return tokens/s for reading a prompt."""
        n_tokens, found = tokens.shape[1], {}
        for row, form in self.forms.items():
            found[row] = n_tokens / min(seconds_of(partial(form, tokens)) for _ in range(2))
        for row, llama in self.llama.items():
            found[row] = 1e3 * n_tokens / min(llama.prefill(tokens[0].tolist()) for _ in range(2))
        if self.peer is not None and n_tokens <= self.most:
            call = partial(self.peer, tokens, use_cache=True, logits_to_keep=1)
            found[TRANSFORMERS] = n_tokens / min(seconds_of(call) for _ in range(2))
        return found

    def steps(self, context: int, rounds: int) -> tuple[dict[str, float], int]:
        """Return milliseconds per token after a context, and the bytes of Recurra's state."""
        mine = {row: Ours(form, context) for row, form in self.forms.items()}
        blocks: Blocks = {row: one.block for row, one in mine.items()}
        if self.peer is not None and context <= self.most:
            blocks[TRANSFORMERS] = Theirs(self.peer, context).block
        read = torch.randint(300, (context,)).tolist()
        blocks |= {row: partial(llama_block, llama, read) for row, llama in self.llama.items()}
        times: dict[str, list[float]] = {row: [] for row in blocks}
        for turn in range(rounds + 1):
            for row, block in blocks.items():
                took = block()
                times[row] += [took] if turn else []  # the first turn is a warm-up
        return {row: statistics.median(taken) for row, taken in times.items()}, n_bytes(next(iter(mine.values())).state)

    def streams(self) -> dict[str, float]:
        """Return total tokens/s of concurrent streams: Recurra in one batched step, llama.cpp in its server."""
        found = {}
        for row, form in self.forms.items():
            many = Ours(form, 64, STREAMS)
            many.block()
            found[row] = STREAMS * 1e3 / min(many.block() for _ in range(3))
        read = torch.randint(300, (64,)).tolist()
        return found | {row: llama.streams(read, STREAMS) for row, llama in self.llama.items()}


def llama_block(llama: Peer, read: list[int]) -> float:
    found = llama.ask(read, STEPS + 1, keep=True)
    return found["predicted_ms"] / (found["predicted_n"] - 1)


@torch.inference_mode()
def measure(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    with ExitStack() as stack:
        sides = Sides(name, arguments, stack)
        found: dict[str, Any] = {"parameters": sum(p.numel() for p in sides.ours.parameters())}
        found["prompts"] = {length: sides.prompts(torch.randint(300, (1, length))) for length in arguments.prompts}
        found["steps"], found["state bytes"] = {}, {}
        for context in arguments.contexts:
            found["steps"][context], found["state bytes"][context] = sides.steps(context, arguments.rounds)
        found["streams"] = sides.streams()
    return found


def show(name: str, found: dict[str, Any]) -> None:
    contexts, prompts = found["steps"], found["prompts"]
    columns = [f"ms at {int(context):,}" for context in contexts] + [f"prompt of {n:,}, tokens/s" for n in prompts]
    table = Table(f"{name}, {found['parameters'] / 1e6:,.0f}M", *columns, f"{STREAMS} streams, tokens/s")
    for row in found["streams"] | dict.fromkeys(next(iter(prompts.values()))):
        cells = [*(f"{at[row]:.2f}" if row in at else "" for at in contexts.values())]
        cells += [f"{at[row]:,.0f}" if row in at else "" for at in prompts.values()]
        table.add_row(row, *cells, f"{found['streams'][row]:,.0f}" if row in found["streams"] else "")
    Console(width=150).print(table)
    print("bytes of the state:", ", ".join(f"{n:,} at {context:,}" for context, n in found["state bytes"].items()))


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [name for name in SHAPES if name != "dry"]
    parser.add_argument("--only", nargs="+", choices=SHAPES, default=names, metavar="MODEL")
    parser.add_argument("--numbers", nargs="+", choices=NUMBERS, default=list(NUMBERS))
    parser.add_argument("--contexts", nargs="+", type=int, default=[128, 4096])
    parser.add_argument("--prompts", nargs="+", type=int, default=[512, 4096])
    parser.add_argument("--most", type=int, default=512, help="longest context for transformers (default: 512)")
    parser.add_argument("--rounds", type=int, default=3, help=f"blocks of {STEPS} steps (default: 3)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--peer", default=".venv-llama/bin/python", help="Python with xllamacpp and gguf")
    parser.add_argument(
        "--folder", type=Path, help="folder for GGUF files, deleted after use (default: a temporary one)"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks-published.json"))
    arguments = parser.parse_args(words)
    torch.set_num_threads(arguments.threads)
    keep_large_blocks()
    warnings.filterwarnings("ignore")
    known = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    for name in arguments.only:
        found = measure(name, arguments)
        show(name, found)
        known |= {"cpu": cpu_name(), "torch": torch.__version__, "threads": arguments.threads, name: found}
        arguments.out.write_text(json.dumps(known, indent=1))  # after each model, because one takes minutes
        gc.collect()


if __name__ == "__main__":
    main()
