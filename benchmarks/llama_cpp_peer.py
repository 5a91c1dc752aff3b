"""The other side of `benchmarks.llama_cpp`: random weights as GGUF files, and llama.cpp's server answering on a pipe.

It runs in an environment of its own with xllamacpp and gguf, and without torch:

    python benchmarks/llama_cpp_peer.py write gpt2 Q8_0 FILE
    python benchmarks/llama_cpp_peer.py serve FILE THREADS CONTEXT SLOTS

`serve` reads a line of JSON for each call, {"prompt": tokens, "predict": tokens, "keep": reuse what was read,
"streams": how many at once}, and writes one with llama.cpp's own times, {"prompt_n", "prompt_ms", "predicted_n",
"predicted_ms"}, and that of the whole call, "wall_ms".
"""

import json
import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import numpy as np


class Sizes(NamedTuple):
    """A model's sizes: vocabulary, layers and channels."""

    vocabulary: int
    layers: int
    channels: int
    positions: int = 16384
    state: int = 16
    rank: int = 48


SIZES = {"gpt2": Sizes(50257, 12, 768), "mamba": Sizes(50280, 24, 768)}
DRY_SIZES = {"gpt2": Sizes(300, 1, 64, 256), "mamba": Sizes(300, 1, 64, 256, 16, 32)}
BLOCK = 32
"""Q8_0 and Q4_0 have a scale for this many weights of a row; rows of another length stay float32."""


def gpt2_tensors(sizes: Sizes) -> dict[str, tuple[int, ...]]:
    """Names and shapes, as rows of weights by outputs."""
    d = sizes.channels
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (sizes.vocabulary, d),
        "position_embd.weight": (sizes.positions, d),
        "output_norm.weight": (d,),
        "output_norm.bias": (d,),
    }
    for layer in range(sizes.layers):
        block = {"attn_qkv": (3 * d, d), "attn_output": (d, d), "ffn_up": (4 * d, d), "ffn_down": (d, 4 * d)}
        for name, shape in block.items():
            shapes |= {f"blk.{layer}.{name}.weight": shape, f"blk.{layer}.{name}.bias": shape[:1]}
        for name in ("attn_norm", "ffn_norm"):
            shapes |= {f"blk.{layer}.{name}.weight": (d,), f"blk.{layer}.{name}.bias": (d,)}
    return shapes


def mamba_tensors(sizes: Sizes) -> dict[str, tuple[int, ...]]:
    d, inner, state, rank = sizes.channels, 2 * sizes.channels, sizes.state, sizes.rank
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (sizes.vocabulary, d), "output_norm.weight": (d,)}
    for layer in range(sizes.layers):
        block: dict[str, tuple[int, ...]] = {
            "attn_norm.weight": (d,), "ssm_in.weight": (2 * inner, d), "ssm_conv1d.weight": (inner, 4),
            "ssm_conv1d.bias": (inner,), "ssm_x.weight": (rank + 2 * state, inner), "ssm_dt.weight": (inner, rank),
            "ssm_dt.bias": (inner,), "ssm_a": (inner, state), "ssm_d": (inner,), "ssm_out.weight": (d, inner),
        }  # fmt: skip
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in block.items()}
    return shapes


def values(name: str, shape: tuple[int, ...], random: np.random.Generator) -> np.ndarray:
    """Weights that keep the numbers of a stream of any length finite."""
    if name.endswith("norm.weight"):
        return np.ones(shape, np.float32)
    if name.endswith("ssm_a"):
        return -np.broadcast_to(np.arange(1, shape[1] + 1, dtype=np.float32), shape).copy()
    return (0.02 * random.standard_normal(shape, dtype=np.float32)).astype(np.float32)


def write(architecture: str, number: str, path: str, sizes: Sizes) -> int:
    """Write a model; return the bytes of the weights that a step reads, which are all but the positions."""
    import gguf

    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(sizes.positions if architecture == "gpt2" else 1 << 20)
    writer.add_embedding_length(sizes.channels)
    writer.add_block_count(sizes.layers)
    writer.add_feed_forward_length(4 * sizes.channels if architecture == "gpt2" else 0)
    writer.add_head_count(sizes.channels // 64 if architecture == "gpt2" else 0)
    if architecture == "gpt2":
        writer.add_layer_norm_eps(1e-5)
    else:
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_ssm_conv_kernel(4)
        writer.add_ssm_inner_size(2 * sizes.channels)
        writer.add_ssm_state_size(sizes.state)
        writer.add_ssm_time_step_rank(sizes.rank)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([f"t{token}" for token in range(sizes.vocabulary)])
    writer.add_token_types([gguf.TokenType.NORMAL] * sizes.vocabulary)
    writer.add_token_merges(["t 1"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    random, kind, n_bytes = np.random.default_rng(0), gguf.GGMLQuantizationType[number], 0
    shapes = gpt2_tensors(sizes) if architecture == "gpt2" else mamba_tensors(sizes)
    for name, shape in shapes.items():
        tensor = values(name, shape, random)
        # norms, convolutions and decays stay float32, as in llama.cpp's own files
        quantised = number != "F32" and len(shape) == 2 and shape[1] % BLOCK == 0 and not name.startswith("position")
        data = gguf.quants.quantize(tensor, kind) if quantised else tensor
        writer.add_tensor(name, data, raw_dtype=kind if quantised else None)
        n_bytes += 0 if name.startswith("position") else data.nbytes
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return n_bytes


def serve(path: str, threads: int, context: int, slots: int) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # llama.cpp writes about itself to the standard output
    import xllamacpp

    params: Any = xllamacpp.CommonParams()
    params.model.path = path
    params.n_ctx, params.n_parallel, params.n_gpu_layers = context, slots, 0
    params.n_batch = params.n_ubatch = 512
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.verbosity = -1
    params.fit_params = False
    params.kv_unified = True  # all slots share the context
    server = xllamacpp.Server(params)
    for line in sys.stdin:
        asked = json.loads(line)
        start = time.perf_counter()
        with ThreadPoolExecutor(asked["streams"]) as pool:
            replies = list(pool.map(partial(answer, server), [asked] * asked["streams"]))
        wall = 1e3 * (time.perf_counter() - start)
        print(json.dumps(replies[-1] | {"wall_ms": wall}), file=answers, flush=True)


def answer(server: Any, asked: dict[str, Any]) -> dict[str, float]:
    reply: Any = server.handle_completions(
        {
            "prompt": asked["prompt"],
            "n_predict": asked["predict"],
            "ignore_eos": True,
            "cache_prompt": asked["keep"],
            "temperature": 0.0,
            "samplers": ["top_k"],
            "top_k": 1,
            "timings_per_token": False,
            "stream": False,
        }
    )
    reply = json.loads(reply) if isinstance(reply, (str, bytes)) else reply
    reply = reply[0] if isinstance(reply, list) else reply
    times = reply.get("timings")
    if not times:
        raise SystemExit(f"llama.cpp gave no times: {str(reply)[:500]}")
    return {name: times[name] for name in ("prompt_n", "prompt_ms", "predicted_n", "predicted_ms")}


def serve_http(path: str, threads: int, slots: int, port: int) -> None:
    """Serve on 127.0.0.1 until a signal comes, with a context of 256 tokens for each slot, at least."""
    import xllamacpp

    params: Any = xllamacpp.CommonParams()
    params.model.path = path
    params.n_ctx, params.n_parallel, params.n_gpu_layers = 256 * slots if slots > 1 else 512, slots, 0
    params.n_batch = params.n_ubatch = 512
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.cont_batching, params.warmup, params.fit_params, params.verbosity = True, True, False, -1
    params.hostnames, params.port, params.n_threads_http = ["127.0.0.1"], port, 2
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    signal.pause()


def main(words: list[str]) -> None:
    if words[0] == "write":
        sizes = (DRY_SIZES if "--dry" in words else SIZES)[words[1]]
        print(write(words[1], words[2], words[3], sizes))
    elif words[0] == "info":
        import xllamacpp

        print(json.dumps({"llama.cpp": str(xllamacpp.BUILD_INFO), "system": str(xllamacpp.get_system_info())}))
    elif words[0] == "http":
        serve_http(words[1], int(words[2]), int(words[3]), int(words[4]))
    else:
        serve(words[1], int(words[2]), int(words[3]), int(words[4]))


if __name__ == "__main__":
    main(sys.argv[1:])
