"""A linear layer for inference: its weight is kept in fewer bits and read once for many vectors."""

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from recurra.checks import kind_of, require_choice, sentence
from recurra.decoding.operators import decoding_linear
from recurra.decoding.panels import from_int4, from_panels, from_quads, to_int4, to_panels, to_quads

NUMBERS = ("float32", "bfloat16", "int8", "int4")
"""How weights can be kept."""

MOST_VECTORS = 64
"""Most vectors that are multiplied by float32 weights here; above it torch's product is as fast."""


class DecodingLinear(nn.Module):
    """y = x W^T + b, as `nn.Linear` computes it, for inference on a CPU.

    "float32" shares the layer's weight; sums are float32, in another order than torch's. "bfloat16" rounds each weight
    to 8 bits of precision; inputs stay float32. "int8" quantises: it keeps whole numbers from -127 to 127, and for each
    output one float32 scale, the output's largest weight / 127. "int4" keeps whole numbers from 0 to 15, and for every
    32 inputs of an output a float16 scale and minimum: 5 bits a weight in all. With both, every 128 inputs of a vector
    are rounded to whole numbers from -127 to 127 times a scale (`rounded`), and products are exact. The result for a
    vector does not depend on the others, except for more than 64 with "float32", which torch multiplies.

    Args:
        linear: the layer whose weights to use, float32 on the CPU.
        numbers: "float32", "bfloat16", "int8" or "int4".

    Raises:
        ValueError: `numbers` is none of these, the layer is of another type or on another device, or "int4" is asked
            for and a weight is beyond float16.
    """

    stored: Tensor
    scale: Tensor
    bias: Tensor

    def __init__(self, linear: nn.Linear, numbers: str = "float32") -> None:
        super().__init__()
        require_choice(NUMBERS, numbers=numbers)
        weight = linear.weight.detach()
        if weight.dtype != torch.float32 or weight.device.type != "cpu":
            raise ValueError(sentence("linear.weight", kind_of(weight), "float32 on the CPU"))
        self.numbers, self.in_features, self.out_features = numbers, linear.in_features, linear.out_features
        scale = torch.ones(self.out_features, dtype=torch.float32, device=weight.device)
        if numbers == "int8":
            scale = (weight.abs().amax(dim=1) / 127).clamp_min(torch.finfo(torch.float32).tiny)
            weight = (weight / scale.unsqueeze(1)).round().to(torch.int8)
        self.register_buffer("stored", _stored(weight, numbers))
        self.register_buffer("scale", scale)
        bias = linear.bias.detach() if linear.bias is not None else torch.zeros_like(scale)
        self.register_buffer("bias", bias)

    def forward(self, x: Float[Tensor, "*rows n_in"]) -> Float[Tensor, "*rows n_out"]:
        """Multiply every row of `x`.

        Raises:
            RuntimeError: `x` requires a gradient; train the model that this layer was made from.
            ValueError: `x` is not float32, or of another width.
        """
        if x.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(
                sentence(
                    "x",
                    "a tensor that requires a gradient",
                    "one that does not",
                    "call the copy under torch.no_grad(), or train the model itself",
                )
            )
        if torch.is_autocast_enabled("cpu"):  # what torch has rounded for its own products
            x = x.float()
        if x.dtype != torch.float32 or x.shape[-1] != self.in_features:
            raise ValueError(sentence("x", kind_of(x), f"float32 (..., {self.in_features})"))
        vectors = x.numel() // self.in_features
        if not vectors or (vectors > MOST_VECTORS and self.numbers == "float32"):
            return functional.linear(x, self.weight, self.bias)
        return decoding_linear(x, self.stored, self.scale, self.bias)

    @property
    def rounds_inputs(self) -> bool:
        """Whether the inputs are rounded to whole numbers, too."""
        return self.numbers in ("int8", "int4")

    @property
    def weight(self) -> Float[Tensor, "n_out n_in"]:
        """The weights as float32, computed at each access unless they are kept so."""
        if self.numbers == "float32":
            return self.stored
        if self.numbers == "int4":
            return from_int4(self.stored, self.out_features, self.in_features)
        if self.numbers == "int8":
            weight = from_quads(self.stored.float(), self.out_features, self.in_features)
        else:
            weight = from_panels(self.stored.float(), self.out_features)
        return weight * self.scale.unsqueeze(1)

    def extra_repr(self) -> str:
        """What print shows."""
        return f"{self.in_features}, {self.out_features}, numbers={self.numbers}"


def _stored(weight: Tensor, numbers: str) -> Tensor:
    """Arrange weights as the kernels read them (see `panels`)."""
    if numbers == "float32":
        return weight.contiguous()
    if numbers == "int4":
        return to_int4(weight)
    return to_quads(weight) if numbers == "int8" else to_panels(weight.bfloat16())
