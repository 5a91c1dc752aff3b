"""The published ViT-B/16 models on clips of 8 frames of 224 pixels: parameters, one training step, its memory and time.

    python -m benchmarks.video

Random weights and random clips; two segments of 8 frames for each of 2 clips, as the CRT paper trains CR-ViT.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.table import cpu_name, keep
from recurra._process import keep_large_blocks
from recurra.video.crvit import CompactRecurrentViT, CompactRecurrentViTConfig
from recurra.video.timesformer import TimeSformer, TimeSformerConfig

SIZES = {"n_frames": 8, "image_size": 224}
MODELS = {
    "timesformer": lambda n_classes: TimeSformer(TimeSformerConfig(n_classes=n_classes, **SIZES)),
    "cr-vit-gru": lambda n_classes: CompactRecurrentViT(CompactRecurrentViTConfig(n_classes=n_classes, **SIZES)),
    "cr-vit-ncgru": lambda n_classes: CompactRecurrentViT(
        CompactRecurrentViTConfig(n_classes=n_classes, cell="ncgru", **SIZES)
    ),
}


def train_one_step(name: str, clips: int, segments: int, n_classes: int) -> dict[str, Any]:
    """Build a model and take one update (SGD, the published settings) on random clips."""
    torch.manual_seed(0)
    model = MODELS[name](n_classes)
    shape = model.config
    inputs = torch.randn(clips, segments * shape.n_frames, shape.n_channels, shape.image_size, shape.image_size)
    targets = torch.randint(n_classes, (clips, segments))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.005, momentum=0.9, weight_decay=1e-4)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    losses, _ = model.loss(inputs, targets)
    losses.mean().backward()
    optimizer.step()
    seconds = time.perf_counter() - start
    with torch.no_grad():
        after, _ = model.eval().loss(inputs, targets)
    return {
        "model": name,
        "parameters": sum(p.numel() for p in model.parameters()),
        "clips": clips,
        "frames": inputs.shape[1],
        "loss": losses.mean().item(),
        "loss after the step": after.mean().item(),
        "seconds of the step": seconds,
        "GB before": before / 1e6,
        "GB at the peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2, help="threads for torch (default: 2)")
    parser.add_argument("--clips", type=int, default=2, help="clips in the batch (default: 2)")
    parser.add_argument("--segments", type=int, default=2, help="segments of 8 frames in a clip (default: 2)")
    parser.add_argument("--classes", type=int, default=31, help="classes (default: 31, as in Toyota Smarthome)")
    parser.add_argument("--model", choices=MODELS, help="one model, in this process, its figures printed as JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    keep_large_blocks()
    if arguments.model is not None:
        print(json.dumps(train_one_step(arguments.model, arguments.clips, arguments.segments, arguments.classes)))
        return
    rows = []
    for name in MODELS:  # each in a process of its own, whose peak memory is the model's
        command = [sys.executable, "-m", "benchmarks.video", *sys.argv[1:], "--model", name]
        rows.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
        table = Table(title=name, show_header=False)
        for key, value in rows[-1].items():
            table.add_row(
                key, f"{value:,.3f}" if isinstance(value, float) else f"{value:,}" if key != "model" else value
            )
        Console().print(table)
    kept = Path("runs/benchmarks-video.json")
    keep(kept, {"cpu": cpu_name(), "torch": torch.__version__, "one training step": rows})


if __name__ == "__main__":
    main()
