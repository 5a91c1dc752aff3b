"""The gated recurrent unit whose reset gate acts before the recurrent product (CRT (4))."""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from recurra.checks import kind_of, require_at_least, sentence


class GateWeights(NamedTuple):
    """W, U and b of one line of CRT (4)."""

    input: Float[Tensor, "H D"]
    recurrent: Float[Tensor, "H H"]
    bias: Float[Tensor, " H"]


class RecurrentWeights(NamedTuple):
    """What all steps of a sequence share, made once: U_r over U_u, and U_c."""

    gates: Float[Tensor, "gates H"]
    candidate: Float[Tensor, "H H"]


class Gates(NamedTuple):
    """What CRT (4) computes on the way to the next state: r_t, u_t and c_t."""

    reset: Float[Tensor, "B H"]
    update: Float[Tensor, "B H"]
    candidate: Float[Tensor, "B H"]


class GRUCell(nn.Module):
    """One step of the GRU of CRT (4), which the paper also calls Phi = tanh (CRT Lemma 2).

        r = sigmoid(W_r x + U_r h + b_r)
        u = sigmoid(W_u x + U_u h + b_u)
        c = tanh(W_c x + U_c (r * h) + b_c)
        h' = (1 - u) * h + u * c

    The reset gate acts BEFORE the product with U_c. torch.nn.GRU computes r * (U_c h + b) instead, and its update gate
    keeps h where this one replaces it: neither its outputs nor its weights are this cell's.

    A sequence does not have to run through `forward` step by step: `project` computes the products with x for all steps
    at once, `recurrent_weights` prepares what the steps share, and `step` does the rest. `forward` is these three.

    Every weight and bias starts uniform in +-1 / sqrt(hidden_size), as in torch.nn.GRU (our choice; the paper does not
    say). The state is float64 in a float64 module, and float32 in any other and under autocast.

    Args:
        input_size: channels D of x.
        hidden_size: channels H of h.

    Raises:
        ValueError: a size is below 1.
    """

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        require_at_least(1, input_size=input_size, hidden_size=hidden_size)
        self.input_size, self.hidden_size = input_size, hidden_size
        # rows: reset, update, candidate
        self.input_weight = nn.Parameter(torch.empty(3 * hidden_size, input_size))
        self.bias = nn.Parameter(torch.empty(3 * hidden_size))
        self.gate_weight = nn.Parameter(torch.empty(2 * hidden_size, hidden_size))
        self.candidate_weight = nn.Parameter(torch.empty(hidden_size, hidden_size))
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -(hidden_size**-0.5), hidden_size**-0.5)

    @property
    def reset(self) -> GateWeights:
        """W_r, U_r and b_r."""
        return self._line(0, self.gate_weight[: self.hidden_size])

    @property
    def update(self) -> GateWeights:
        """W_u, U_u and b_u."""
        return self._line(1, self.gate_weight[self.hidden_size :])

    @property
    def candidate(self) -> GateWeights:
        """W_c, U_c and b_c."""
        return self._line(2, self.candidate_weight)

    def _line(self, index: int, recurrent: Tensor) -> GateWeights:
        rows = slice(index * self.hidden_size, (index + 1) * self.hidden_size)
        return GateWeights(self.input_weight[rows], recurrent, self.bias[rows])

    def project(self, x: Float[Tensor, "*steps D"]) -> Float[Tensor, "*steps projected"]:
        """Compute W x + b of the reset gate, the update gate and the candidate, side by side, for any number of steps.

        Raises:
            ValueError: x does not have `input_size` channels.
        """
        if x.shape[-1] != self.input_size:
            raise ValueError(sentence("x", kind_of(x), f"{self.input_size} channels, the cell's input_size"))
        return functional.linear(x, self.input_weight, self.bias)

    def recurrent_weights(self, dtype: torch.dtype | None = None) -> RecurrentWeights:
        """Return the matrices of the products with h in `dtype`, that of the projected x; None keeps their own."""
        return RecurrentWeights(self.gate_weight.to(dtype=dtype), self.candidate_weight.to(dtype=dtype))

    def gates(
        self, projected: Float[Tensor, "B projected"], h: Float[Tensor, "B H"], weights: RecurrentWeights
    ) -> Gates:
        """Compute r, u and c of one step from the projected input and the state h that enters it."""
        of_gates, of_candidate = projected.split([2 * self.hidden_size, self.hidden_size], -1)
        r, u = torch.addmm(of_gates, h.to(projected.dtype), weights.gates.t()).sigmoid().chunk(2, -1)
        reset = (r * h).to(projected.dtype)
        return Gates(r, u, torch.addmm(of_candidate, reset, weights.candidate.t()).tanh())

    def step(
        self, projected: Float[Tensor, "B projected"], h: Float[Tensor, "B H"], weights: RecurrentWeights
    ) -> Float[Tensor, "B H"]:
        """Compute the next state, in the precision of `h`."""
        _, u, c = self.gates(projected, h, weights)
        return torch.lerp(h, c.to(h.dtype), u.to(h.dtype))

    def forward(self, x: Float[Tensor, "B D"], h: Float[Tensor, "B H"]) -> Float[Tensor, "B H"]:
        """Compute the next state from one step's input and the state before it.

        Raises:
            ValueError: x does not have `input_size` channels, or h is not (batch of x, `hidden_size`).
        """
        projected = self.project(x)
        return self.step(projected, self.entering(h, x.shape[0]), self.recurrent_weights(projected.dtype))

    def entering(self, h: Tensor, batch: int) -> Float[Tensor, "B H"]:
        """Check a state from outside, and return it in the cell's precision, at least float32.

        Raises:
            ValueError: h is not (batch, `hidden_size`).
        """
        if h.shape != (batch, self.hidden_size):
            raise ValueError(sentence("h", kind_of(h), f"(batch, hidden) = {(batch, self.hidden_size)}"))
        return h.to(torch.promote_types(self.bias.dtype, torch.float32))
