"""torch's attention, in a form that the transforms of torch.func accept."""

from typing import Any

from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from recurra.kernels.operators import transforms_are_active


def dot_product_attention(queries: Tensor, keys: Tensor, values: Tensor, **options: Any) -> Tensor:
    """Compute `torch.nn.functional.scaled_dot_product_attention`, which takes the same options.

    Under torch.func and forward derivatives it computes in plain operators: torch's fast kernels have no rules there.
    """
    if not transforms_are_active():
        return functional.scaled_dot_product_attention(queries, keys, values, **options)
    with sdpa_kernel(SDPBackend.MATH):
        return functional.scaled_dot_product_attention(queries, keys, values, **options)
