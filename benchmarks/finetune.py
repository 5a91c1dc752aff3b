"""Fine-tuning updates with LoRA, in Recurra and in transformers with peft: tokens/s and peak memory.

    python -m benchmarks.finetune
    python -m benchmarks.finetune --only granite-4.0-h-350m --tokens 256

The shapes of `benchmarks.published` with random weights, frozen, in float32 and in bfloat16; adapters of rank 8 on all
linear layers; one sequence of 1,024 tokens, with activation checkpointing. Each library runs in its own process.
Peak memory is its maximum resident memory, without file-backed pages. RWKV-7 has no class in transformers.
"""

import argparse
import gc
import json
import resource
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn import functional

from benchmarks.published import SHAPES, ours, theirs
from benchmarks.table import cpu_name
from recurra._process import keep_large_blocks, return_free_memory
from recurra.train._ranks import recompute_blocks

SIDES = {"recurra": "Recurra", "transformers": "transformers and peft"}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def adapted(model: nn.Module) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(target_modules="all-linear", r=8, lora_alpha=16))


def loss_of(side: str, model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    if side == "recurra":
        loss: torch.Tensor = model.get_base_model().loss(inputs, targets)[0].mean()  # type: ignore[operator]
        return loss
    logits = model(inputs, use_cache=False).logits
    return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class Peak:
    """Peak anonymous memory of this process, sampled every 20 ms."""

    def __init__(self) -> None:
        self.most, self.ended = 0, False
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while not self.ended:
            lines = Path("/proc/self/status").read_text().splitlines()
            self.most = max(self.most, *(int(line.split()[1]) for line in lines if line.startswith("RssAnon")))
            time.sleep(0.02)


def measure(side: str, name: str, dtype: str, n_tokens: int, steps: int) -> dict[str, Any]:
    peer: Any = theirs(name)
    if side == "recurra":
        with tempfile.TemporaryDirectory() as folder:
            if peer is not None:
                peer.save_pretrained(folder)
            peer = None
            gc.collect()
            return_free_memory()
            peer = ours(name, Path(folder), DTYPES[dtype])
    model: Any = adapted(peer.to(DTYPES[dtype])).train()
    if side == "recurra":
        recompute_blocks(model.get_base_model())
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4)
    tokens, times = torch.randint(300, (1, n_tokens + 1)), []
    peak = Peak()
    for _ in range(steps + 1):
        start = time.perf_counter()
        loss_of(side, model, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - start)
    peak.ended = True
    return {
        "trained": sum(parameter.numel() for parameter in trained),
        "tokens/s": n_tokens / min(times[1:]),
        "GB": peak.most / 1e6,
        "GB with files": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
    }


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [name for name in SHAPES if name != "dry"]
    parser.add_argument("--only", nargs="+", choices=SHAPES, default=names, metavar="MODEL")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=2, help="updates after a warm-up; the fastest counts (default: 2)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks-finetune.json"))
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args(words)
    warnings.filterwarnings("ignore")
    if arguments.child:
        torch.set_num_threads(arguments.threads)
        keep_large_blocks()
        case = (arguments.sides[0], arguments.only[0], arguments.dtypes[0])
        print(json.dumps(measure(*case, arguments.tokens, arguments.steps)))
        return
    known = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    table = Table("", "weights", "", "tokens/s", "GB")
    for name in arguments.only:
        for dtype in arguments.dtypes:
            for side in arguments.sides:
                if side == "transformers" and not SHAPES[name][0]:
                    continue
                command = [sys.executable, "-m", "benchmarks.finetune", "--child", "--only", name, "--dtypes", dtype]
                command += ["--sides", side, "--threads", str(arguments.threads), "--tokens", str(arguments.tokens)]
                ended = subprocess.run([*command, "--steps", str(arguments.steps)], stdout=subprocess.PIPE, text=True)
                if ended.returncode:
                    table.add_row(name, dtype, SIDES[side], f"ended with status {ended.returncode}", "")
                    continue
                found = json.loads(ended.stdout.splitlines()[-1])
                known |= {"cpu": cpu_name(), "torch": torch.__version__, f"{name}, {dtype}, {side}": found}
                arguments.out.write_text(json.dumps(known, indent=1))
                table.add_row(name, dtype, SIDES[side], f"{found['tokens/s']:,.0f}", f"{found['GB']:.1f}")
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
