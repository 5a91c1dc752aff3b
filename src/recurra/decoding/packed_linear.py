"""A linear layer for inference whose weight is kept in fewer bits and read once per step."""

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from recurra.decoding.operators import packed_linear

NUMBERS = ("float32", "bfloat16", "int8")
"""What weights may be kept as."""

MOST_VECTORS = 8
"""Vectors that are multiplied at once by the kernel; above it torch's matrix product is faster."""


class PackedLinear(nn.Module):
    """y = x W^T + b as `nn.Linear` gives it, for inference on a CPU.

    float32 shares the layer's weight; sums are float32, in another order than torch's. bfloat16 rounds each weight to 8
    bits of precision. int8 keeps whole numbers from -127 to 127 and one float32 scale for each output, its largest
    weight / 127; inputs and sums stay float32.

    Args:
        linear: the layer whose weights to take, float32 on the CPU.
        numbers: "float32", "bfloat16" or "int8".

    Raises:
        ValueError: there are no such numbers, or the layer is of another type or on another device.
    """

    packed: Tensor
    scale: Tensor
    bias: Tensor

    def __init__(self, linear: nn.Linear, numbers: str = "float32") -> None:
        super().__init__()
        if numbers not in NUMBERS:
            raise ValueError(f"numbers is {numbers!r}; expected one of {', '.join(NUMBERS)}")
        weight = linear.weight.detach()
        if weight.dtype != torch.float32 or weight.device.type != "cpu":
            raise ValueError(f"the layer is {weight.dtype} on {weight.device}; expected float32 on the CPU")
        self.numbers, self.in_features, self.out_features = numbers, linear.in_features, linear.out_features
        scale = torch.ones(self.out_features)
        if numbers == "int8":
            scale = (weight.abs().amax(dim=1) / 127).clamp_min(torch.finfo(torch.float32).tiny)
            weight = (weight / scale.unsqueeze(1)).round().to(torch.int8)
        self.register_buffer("packed", weight.to(getattr(torch, numbers)).contiguous())
        self.register_buffer("scale", scale)
        self.register_buffer("bias", torch.zeros(self.out_features) if linear.bias is None else linear.bias.detach())

    def forward(self, x: Float[Tensor, "*rows n_in"]) -> Float[Tensor, "*rows n_out"]:
        """Multiply every row of `x`.

        Raises:
            RuntimeError: a gradient is asked for; train the model that this one was made from.
            ValueError: x is not float32, or of another width.
        """
        if x.requires_grad and torch.is_grad_enabled():
            raise RuntimeError("packed weights are for inference; train the model that they were made from")
        if x.dtype != torch.float32 or x.shape[-1] != self.in_features:
            raise ValueError(f"x is {x.dtype} of width {x.shape[-1]}; expected float32 of width {self.in_features}")
        vectors = x.numel() // self.in_features
        if not 0 < vectors <= MOST_VECTORS:
            return functional.linear(x, self.weight, self.bias)
        return packed_linear(x, self.packed, self.scale, self.bias)

    @property
    def weight(self) -> Float[Tensor, "n_out n_in"]:
        """The weights as float32, for those that read them without calling the layer; unpacked each time."""
        return self.packed if self.numbers == "float32" else self.packed.float() * self.scale.unsqueeze(1)

    def extra_repr(self) -> str:
        """What print shows."""
        return f"{self.in_features}, {self.out_features}, numbers={self.numbers}"
