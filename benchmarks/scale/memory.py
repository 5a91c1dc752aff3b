"""`python -m benchmarks.scale.memory`: what each of 1, 2 and 4 ranks that share a sequence keeps for the backward pass.

For a mixer whose ranks compute at the same time (GateLoop) and one whose states they pass on (GRU), and for several
lengths: the bytes of all storages that autograd saves in a forward pass, each once and parameters left out, on the rank
that saves most. Ranks are processes on this machine, connected over gloo. Prints a table in Markdown.
"""

import argparse
import os
import sys
import tempfile
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.graph import saved_tensors_hooks

from recurra.models.language_model import LanguageModel, LanguageModelConfig
from recurra.train.sequence_parallel import Pieces, in_pieces

MIXERS = {"gateloop": "a linear recurrence", "gru": "passes its state on"}
RANKS = (1, 2, 4)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale.memory", description=__doc__.partition("\n\n")[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--channels", type=int, default=64)
    arguments = parser.parse_args()
    kept = {}
    for world in RANKS:
        with tempfile.TemporaryDirectory() as folder:
            context = get_context("spawn")
            with context.Pool(world) as pool:
                work = [(rank, world, folder, arguments) for rank in range(world)]
                of_ranks = pool.starmap(measured, work, chunksize=1)
            kept[world] = {case: max(of_rank[case] for of_rank in of_ranks) for case in of_ranks[0]}
    print("| mixer | length | " + " | ".join(f"{n} rank{'s' * (n > 1)}, MiB" for n in RANKS) + " |")
    print("|---|---:|" + "---:|" * len(RANKS))
    for case in kept[1]:
        cells = (f"{kept[n][case] / 2**20:.2f} ({kept[n][case] / kept[1][case]:.3f})" for n in RANKS)
        print(f"| {case[0]} ({MIXERS[case[0]]}) | {case[1]:,} | " + " | ".join(cells) + " |")
    return 0


def measured(rank: int, world: int, folder: str, arguments: argparse.Namespace) -> dict[tuple[str, int], int]:
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(minutes=5))
    pieces = Pieces.of(dist.group.WORLD) if world > 1 else None
    kept = {}
    for mixer in MIXERS:
        torch.manual_seed(0)
        options = {"n_layer": arguments.layers, "d_model": arguments.channels, "mixer": mixer}
        model = LanguageModel(LanguageModelConfig(256, d_channel_mixing=2 * arguments.channels, **options))
        for length in arguments.lengths:
            tokens = torch.randint(256, (1, length + 1), generator=torch.Generator().manual_seed(1))
            inputs, targets = (part.tensor_split(world, 1)[rank] for part in (tokens[:, :-1], tokens[:, 1:]))
            kept[mixer, length] = saved_bytes(model, inputs, targets, pieces)
    dist.barrier()
    dist.destroy_process_group()
    return kept


def saved_bytes(model: LanguageModel, inputs: torch.Tensor, targets: torch.Tensor, pieces: Pieces | None) -> int:
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    sizes: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor  # which keeps its storage, so that no other one gets its address

    def call(state: Any) -> tuple[torch.Tensor, Any]:
        return model.loss(inputs, targets, state)

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        losses, _ = call(None) if pieces is None else in_pieces(model, call, None, pieces)
    losses.sum().backward()
    return sum(sizes.values())


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
