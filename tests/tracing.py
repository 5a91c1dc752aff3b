"""torch.compile without a compiler: forward and backward are traced as for Inductor, and what was traced is run."""

from collections.abc import Callable

import torch


def compile_by_tracing(function: Callable) -> Callable:
    """Compile to one graph each way with Dynamo and AOTAutograd, which come before every compiler.

    The backend "aot_eager" also chooses what the backward pass computes again, which takes a quarter of its time: that
    is torch's own business, and our operators go through it in their own tests.
    """
    from functorch.compile import default_partition, make_boxed_func  # seconds, for the tests that compile alone
    from torch._dynamo.backends.common import aot_autograd

    keep = lambda graph, inputs: make_boxed_func(graph.forward)  # noqa: E731
    both_ways = aot_autograd(fw_compiler=keep, partition_fn=default_partition)
    return torch.compile(function, fullgraph=True, backend=both_ways)
