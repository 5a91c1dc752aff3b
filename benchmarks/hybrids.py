"""Decoding speed of a random hybrid of Granite 4.0 H 350M's shape: streams at different positions, and long windows.

    python -m benchmarks.hybrids streams      # one stream, 16 at the same position, 16 at different ones
    python -m benchmarks.hybrids cache        # keys and values in float32 and in int8, up to 32,768 tokens
    python -m benchmarks.hybrids quality      # perplexity of a small, newly trained model with rounded states

Times are processor time on one thread, the minimum of a few steps.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from recurra.decoding.steps import prepare
from recurra.models.language_model import LanguageModel, LanguageModelConfig
from recurra.state import batch, n_bytes

_ATTENTION = {10, 13, 17, 27}


def model(n_layer: int) -> LanguageModel:
    """Return the model, or one with only its first `n_layer` layers."""
    torch.manual_seed(0)
    options = {
        "rotary-attention": {"n_heads": 12, "n_kv_heads": 4, "window": None, "rotated_share": 0.0},
        "mamba2": {"d_state": 128, "n_heads": 48, "d_inner": 1536},
    }
    config = LanguageModelConfig(
        vocab_size=100_352,
        n_layer=n_layer,
        d_model=768,
        d_channel_mixing=2048,
        mixer=["rotary-attention" if layer in _ATTENTION else "mamba2" for layer in range(n_layer)],
        mixer_options=options,
        feed_forward="swiglu",
        norm="rms",
        biases=False,
        tie_embeddings=True,
    )
    return LanguageModel(config).eval()


def state_after(step: Any, n_tokens: int) -> Any:
    """Return a state of the given number of tokens, with random keys and values, because reading tokens takes long."""
    _, state = step(torch.zeros(1, 2, dtype=torch.int64), None)
    random = [torch.randn(1, n_tokens, *state.layers[layer][0].shape[2:]) for layer in _ATTENTION]
    if state.layers[min(_ATTENTION)][0].dtype == torch.int8:
        from recurra.layers.quantization import quantized

        random = [quantized(torch.randn(1, n_tokens, 4, 64), torch.int8) for _ in _ATTENTION]
    windows = dict(zip(_ATTENTION, random))
    layers = [type(one)(windows[at], windows[at]) if at in windows else one for at, one in enumerate(state.layers)]
    return type(state)(tuple(layers))


def seconds(step: Any, state: Any, rows: int, count: int = 6) -> float:
    """Return the processor seconds of the fastest step."""
    tokens, found = torch.zeros(rows, 1, dtype=torch.int64), []
    for _ in range(count + 2):
        start = time.process_time()
        _, state = step(tokens, state)
        found.append(time.process_time() - start)
    return min(found[2:])  # the first steps copy the state into a buffer with room to grow


def streams(step: Any) -> dict[str, float]:
    """Return tokens per second of processor time."""
    states = {
        "one": [512],
        "16, same position": [512] * 16,
        "16, different positions": [256 + 33 * number for number in range(16)],
    }
    return {
        name: round(len(lengths) / seconds(step, batch([state_after(step, n) for n in lengths]), len(lengths)), 1)
        for name, lengths in states.items()
    }


def cache(step: Any) -> dict[str, dict[str, float]]:
    """Return milliseconds per step, and megabytes of keys and values in the state."""
    found = {}
    for n_tokens in (512, 4_096, 32_768):
        state = state_after(step, n_tokens)
        size = sum(n_bytes(state.layers[layer]) for layer in _ATTENTION)
        found[str(n_tokens)] = {"ms": round(1e3 * seconds(step, state, 1), 2), "MB": round(size / 1e6, 1)}
    return found


def trained(updates: int = 300) -> tuple[LanguageModel, torch.Tensor]:
    """Return a small hybrid trained on bytes of the documentation, and held-out bytes."""
    text = b"".join(path.read_bytes() for path in sorted(Path("docs").rglob("*.md")))
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    seen, unseen = tokens[:-8_192], tokens[-8_192:]
    torch.manual_seed(0)
    options = {"gated-attention": {"n_heads": 4, "window": None}, "gated-delta-net": {"n_heads": 2}}
    mixers = ["gated-delta-net", "gated-attention"] * 2
    small = LanguageModel(LanguageModelConfig(256, None, 4, 128, 256, mixer=mixers, mixer_options=options))
    optimizer = torch.optim.AdamW(small.parameters(), lr=2e-3, weight_decay=0.01)
    for _ in range(updates):
        starts = torch.randint(len(seen) - 257, (8,)).tolist()
        batch_ = torch.stack([seen[start : start + 257] for start in starts])
        optimizer.zero_grad()
        small.loss(batch_[:, :-1], batch_[:, 1:])[0].mean().backward()
        torch.nn.utils.clip_grad_norm_(small.parameters(), 1.0)
        optimizer.step()
    return small.eval(), unseen


def quality() -> dict[str, dict[str, float]]:
    """Return the perplexity of held-out bytes, read one by one, and the largest relative difference of logits."""
    small, unseen = trained()
    rounded: dict[str, dict[str, Any]] = {
        "float32": {},
        "kv_cache_dtype int8": {"kv_cache_dtype": "int8"},
        "state_dtype int16": {"state_dtype": "int16"},
    }
    found, right = {}, torch.zeros(0)
    with torch.inference_mode():
        for name, options in rounded.items():
            step, state, rows = prepare(small, **options), None, []
            for token in unseen[:-1].split(1):
                logits, state = step(token[None], state)
                rows.append(logits[0, 0])
            logits = torch.stack(rows)
            right = right if len(right) else logits
            perplexity = torch.nn.functional.cross_entropy(logits, unseen[1:]).exp()
            off = (logits - right).abs().max() / right.abs().max()
            found[name] = {"perplexity": round(float(perplexity), 4), "logits": float(f"{off:.2g}")}
    return found


def main() -> None:
    """Print one JSON object per line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("streams", "cache", "quality"))
    parser.add_argument("--weights", default="int8")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.what == "quality":
        print(json.dumps(quality()))
        return
    made = model(32)
    with torch.inference_mode():
        if arguments.what == "streams":
            print(json.dumps(streams(prepare(made, arguments.weights))))
        for kind in ("float32", "int8") if arguments.what == "cache" else ():
            print(json.dumps({kind: cache(prepare(made, arguments.weights, kv_cache_dtype=kind))}), flush=True)


if __name__ == "__main__":
    main()
