"""Speed of published architectures in Recurra, llama.cpp and transformers, with the same random weights.

    make llama
    python -m benchmarks.published
    python -m benchmarks.published --only granite-4.0-h-350m --contexts 128 --prompts 512

Each model decodes one token at a time after each context (in interleaved blocks of 16 greedy steps), reads prompts, and
decodes 16 concurrent streams. Weights are int8 and int4 in Recurra, Q8_0 and Q4_0 in llama.cpp (from files exported by
Recurra), and bfloat16 in transformers, without CUDA extensions. One library or number of bits after the other is in
memory: transformers first, then Recurra beside llama.cpp, whose server has one slot, and 16 for the streams. All
compute only the last logits of a prompt. transformers runs only contexts of up to --most tokens. llama.cpp times its
own prompts and steps; its wheel may be built for older vector instructions than this CPU has. RWKV-7 has no class in
transformers.
"""

import argparse
import gc
import json
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from benchmarks.llama_cpp import Peer
from benchmarks.table import cpu_name
from benchmarks.timing import seconds_of
from recurra._process import keep_large_blocks, return_free_memory
from recurra.convert.portable import PortableModel
from recurra.convert.published.folder import from_huggingface
from recurra.convert.published.gguf_file import to_gguf
from recurra.data.tokenizers import BytePairEncoding
from recurra.decoding.steps import prepare
from recurra.models.language_model import LanguageModel, LanguageModelConfig
from recurra.state import n_bytes

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


def theirs(name: str) -> nn.Module | None:
    """Return transformers' model, in bfloat16; None if it has no class for it."""
    import transformers
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    kind, settings = SHAPES[name]
    if not kind:
        return None
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}ForCausalLM").config_class(**settings)
    torch.set_default_dtype(torch.bfloat16)
    try:
        model: nn.Module = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    finally:
        torch.set_default_dtype(torch.float32)
    return model


def ours(name: str, folder: Path, dtype: torch.dtype = torch.bfloat16) -> LanguageModel:
    """Return Recurra's model with the weights in `folder`, where `theirs` was saved."""
    kind, settings = SHAPES[name]
    model: Any = from_huggingface(folder, dtype=dtype).model if kind else rwkv7(**settings).to(dtype)
    return model


class Ours:
    """Recurra's prepared model after a context, with one or more streams."""

    def __init__(self, form: nn.Module, context: int, streams: int = 1) -> None:
        self.form, self.token, self.state = form, torch.zeros(streams, 1, dtype=torch.int64), None
        for piece in torch.randint(300, (streams, context)).split(1024, dim=1):
            _, self.state = form.hidden(piece, self.state)  # type: ignore[operator]

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


def in_turn(blocks: dict[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """Run blocks in turn; return the median time of each."""
    times: dict[str, list[float]] = {row: [] for row in blocks}
    for turn in range(rounds + 1):
        for row, block in blocks.items():
            took = block()
            times[row] += [took] if turn else []  # the first turn is a warm-up
    return {row: statistics.median(taken) for row, taken in times.items()}


def measure_transformers(model: nn.Module, arguments: argparse.Namespace, found: dict[str, Any]) -> None:
    for length in (length for length in arguments.prompts if length <= arguments.most):
        call = partial(model, torch.randint(300, (1, length)), use_cache=True, logits_to_keep=1)
        found["prompts"][length][TRANSFORMERS] = length / min(seconds_of(call) for _ in range(2))
    for context in (context for context in arguments.contexts if context <= arguments.most):
        found["steps"][context] |= in_turn({TRANSFORMERS: Theirs(model, context).block}, arguments.rounds)


def measure_number(
    name: str, number: Literal["int8", "int4"], folder: Path, arguments: argparse.Namespace, found: dict[str, Any]
) -> None:
    """Measure Recurra beside llama.cpp. Besides their weights, little is in memory."""
    model, kind = ours(name, folder), NUMBERS[number]
    found["parameters"] = sum(parameter.numel() for parameter in model.parameters())
    row, peer, file = f"recurra {number}", f"llama.cpp {kind}", folder / f"{name}-{kind}.gguf"
    has_peer = Path(arguments.peer).exists()
    if has_peer:
        tokenizer = BytePairEncoding.train(["a cat and a dog"], 260)
        to_gguf(PortableModel(model, tokenizer), file, dtype=kind.lower())  # type: ignore[arg-type]
    form: Any = prepare(model, number, in_place=True)
    del model
    return_free_memory()
    longest = max(*arguments.contexts, *arguments.prompts) + 4 * STEPS
    with Peer(arguments.peer, file, arguments.threads, longest) if has_peer else nullcontext() as llama:
        for length in arguments.prompts:
            tokens = torch.randint(300, (1, length))
            took = min(seconds_of(partial(last_logits, form, tokens)) for _ in range(2))
            found["prompts"][length][row] = length / took
            if llama is not None:
                took = min(llama.prefill(tokens[0].tolist()) for _ in range(2))
                found["prompts"][length][peer] = 1e3 * length / took
        for context in arguments.contexts:
            mine, read = Ours(form, context), torch.randint(300, (context,)).tolist()
            blocks = {row: mine.block} | ({peer: partial(llama_block, llama, read)} if llama is not None else {})
            found["steps"][context] |= in_turn(blocks, arguments.rounds)
            found["state bytes"][context] = n_bytes(mine.state)
    found["streams"][row] = streams(form)
    del form, mine, blocks
    gc.collect()
    return_free_memory()
    if has_peer:
        with Peer(arguments.peer, file, arguments.threads, STREAMS * 256, STREAMS) as llama:
            found["streams"][peer] = llama.streams(torch.randint(300, (64,)).tolist(), STREAMS)
        file.unlink()


def last_logits(form: Any, tokens: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = form.head(form.hidden(tokens)[0][:, -1:])
    return logits


def streams(form: nn.Module) -> float:
    """Return total tokens/s of concurrent streams in one batched step; llama.cpp's are in its server."""
    many = Ours(form, 64, STREAMS)
    many.block()
    return STREAMS * 1e3 / min(many.block() for _ in range(3))


def llama_block(llama: Peer, read: list[int]) -> float:
    found = llama.ask(read, STEPS + 1, keep=True)
    return found["predicted_ms"] / (found["predicted_n"] - 1)


@torch.inference_mode()
def measure(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure transformers and free it; then, for each number of bits, Recurra beside llama.cpp."""
    found: dict[str, Any] = {"prompts": {length: {} for length in arguments.prompts}, "state bytes": {}}
    found |= {"steps": {context: {} for context in arguments.contexts}, "streams": {}}
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        peer: Any = theirs(name)
        if peer is not None:
            measure_transformers(peer, arguments, found)
            peer.save_pretrained(folder)
        del peer
        gc.collect()
        return_free_memory()
        for number in arguments.numbers:
            measure_number(name, number, Path(folder), arguments, found)
            gc.collect()
            return_free_memory()
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
    parser.add_argument("--contexts", nargs="+", type=int, default=[128, 4096, 32768])
    parser.add_argument("--prompts", nargs="+", type=int, default=[512, 4096])
    parser.add_argument("--most", type=int, default=512, help="longest context for transformers (default: 512)")
    parser.add_argument("--rounds", type=int, default=3, help=f"blocks of {STEPS} steps (default: 3)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--peer", default=".venv-llama/bin/python", help="Python with xllamacpp and gguf")
    parser.add_argument("--folder", type=Path, help="folder for weights, deleted after use (default: a temporary one)")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks-published.json"))
    arguments = parser.parse_args(words)
    torch.set_num_threads(arguments.threads)
    keep_large_blocks()
    warnings.filterwarnings("ignore")
    if not Path(arguments.peer).exists():
        print(f"{arguments.peer} does not exist: without llama.cpp (make llama)")
    known = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    for name in arguments.only:
        found = measure(name, arguments)
        show(name, found)
        known |= {"cpu": cpu_name(), "torch": torch.__version__, "threads": arguments.threads, name: found}
        arguments.out.write_text(json.dumps(known, indent=1))  # after each model, because one takes minutes


if __name__ == "__main__":
    main()
