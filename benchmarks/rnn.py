"""The RNN layer over its cells beside torch.nn.GRU, whose reset gate acts after the product."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from benchmarks.table import Row
from benchmarks.timing import interleaved, median_ratio
from recurra.mixers.rnn import RNN
from recurra.ops.cells.gru import GRUCell
from recurra.ops.cells.orthogonal import NCGRUCell, Neumann

SHAPES = ((60, 70, 380), (10, 140, 380))
"""(B, L, D): the memory RNN over a Penn Treebank segment (CRT Table 2); a window of recipes/ptb/three-layers.yaml."""
TARGET = 3.0


def _forward_backward(rnn: nn.Module, x: Tensor) -> Callable[[], None]:
    x, gradient = x.clone().requires_grad_(), torch.randn(x.shape)
    leaves = [x, *rnn.parameters()]
    triangles = [p.data for name, p in rnn.named_parameters() if name.endswith("original")]

    def run() -> None:
        torch.autograd.grad(rnn(x)[0], leaves, gradient)
        for triangle in triangles:  # as a training step would, or the Neumann series had nothing to do
            triangle.add_(torch.randn_like(triangle), alpha=1e-4)

    return run


def measure(rounds: int, peers: bool) -> Iterator[Row]:
    """Yield one row per cell: its forward + backward time over torch.nn.GRU's; other libraries have no such cells."""
    for shape in SHAPES:
        channels = shape[-1]
        x = torch.randn(shape)
        modules = {
            "torch.nn.GRU": nn.GRU(channels, channels, batch_first=True),
            "RNN(GRUCell)": RNN(GRUCell(channels, channels)),
            "RNN(NCGRUCell), exact": RNN(NCGRUCell(channels, channels)),
            "RNN(NCGRUCell), Neumann": RNN(NCGRUCell(channels, channels, neumann=Neumann())),
        }
        functions = {name: _forward_backward(module, x) for name, module in modules.items()}
        seconds = interleaved(functions, rounds=max(5, rounds // 4))  # calls long enough for few rounds
        for name, times in seconds.items():
            target = None if name == "torch.nn.GRU" else TARGET
            yield Row(f"{shape} float32", name, times, median_ratio(times, seconds["torch.nn.GRU"]), target, "at most")
