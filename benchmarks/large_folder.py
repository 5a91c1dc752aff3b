"""Memory for loading a large published model and packing it in int4.

    python -m benchmarks.large_folder --folder FOLDER

If FOLDER has no model, shards of a Falcon-H1-7B with random bfloat16 weights (15 GB) are written there. The model is
read in bfloat16 (`from_huggingface`), packed (`prepare`) and generates tokens. Memory is the process's anonymous memory
(Linux's RssAnon). Pages of the memory-mapped shards, which Linux can drop at any time, are counted separately.
"""

import argparse
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file

from recurra.convert.published.folder import from_huggingface
from recurra.decoding.steps import prepare

SHAPE = {
    "hidden_size": 3072,
    "num_hidden_layers": 44,
    "intermediate_size": 12288,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "mamba_d_ssm": 3072,
    "mamba_n_heads": 24,
    "mamba_d_state": 256,
    "mamba_rms_norm": False,
    "vocab_size": 130048,
    "embedding_multiplier": 5.0,
    "lm_head_multiplier": 0.02,
    "ssm_multipliers": [0.35, 0.25, 0.35, 0.5, 0.35],
    "pad_token_id": None,
}


def write(folder: Path, n_layer: int) -> None:
    """Write config.json and one shard per block, without holding the whole model in memory."""
    import transformers

    config = transformers.FalconH1Config(**(SHAPE | {"num_hidden_layers": n_layer}))
    with torch.device("meta"):
        shapes = transformers.FalconH1ForCausalLM(config).state_dict()
    folder.mkdir(parents=True, exist_ok=True)
    noise = torch.randn(2**22).mul_(0.02).bfloat16()
    places: dict[str, str] = {}
    shards: dict[str, dict[str, torch.Tensor]] = {}
    for name, like in shapes.items():
        shards.setdefault(".".join(name.split(".")[:3]), {})[name] = like
    for number, content in enumerate(shards.values()):
        repeated = {
            name: noise.repeat(-(-x.numel() // len(noise)))[: x.numel()].view(x.shape) for name, x in content.items()
        }
        save_file({name: tensor.contiguous() for name, tensor in repeated.items()}, folder / f"{number}.safetensors")
        places |= dict.fromkeys(content, f"{number}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    config.save_pretrained(folder)


def resident() -> dict[str, float]:
    """Return the process's resident GB: anonymous and file-backed."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) / 1e6 for words in lines if words[0] in ("RssAnon:", "RssFile:")}


@contextmanager
def peak(what: str) -> Iterator[None]:
    most, ended = resident()["RssAnon"], threading.Event()

    def watch() -> None:
        nonlocal most
        while not ended.wait(0.05):
            most = max(most, resident()["RssAnon"])

    watcher = threading.Thread(target=watch)
    watcher.start()
    start = time.perf_counter()
    yield
    ended.set()
    watcher.join()
    now = resident()
    print(f"{what}: {time.perf_counter() - start:.0f} s, peak {most:.1f} GB, now {now['RssAnon']:.1f} GB", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=SHAPE["num_hidden_layers"], help="blocks (default: 44)")
    parser.add_argument("--weights", default="int4", choices=["bfloat16", "int8", "int4"])
    parser.add_argument("--tokens", type=int, default=8)
    arguments = parser.parse_args()
    if not (arguments.folder / "config.json").exists():
        with peak("written"):
            write(arguments.folder, arguments.layers)
    with peak("read"):
        model = from_huggingface(arguments.folder, dtype=torch.bfloat16).model
    size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    print(f"the model: {size / 1e9:.1f} GB")
    with peak(f"packed in {arguments.weights}"):
        form = prepare(model, arguments.weights, in_place=True)
    with peak(f"{arguments.tokens} tokens"), torch.inference_mode():
        token, state = torch.zeros(1, 1, dtype=torch.int64), None
        for _ in range(arguments.tokens):
            logits, state = form(token, state)
            token = logits[:, -1].argmax(-1, keepdim=True)


if __name__ == "__main__":
    main()
