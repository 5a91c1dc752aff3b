"""Muon for the matrices between hidden channels, and AdamW for everything else, as one optimiser.

The update of a matrix is its momentum made nearly orthogonal, so that every direction in it moves by the same amount
(Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024; `torch.optim.Muon`). Vectors,
embeddings and heads are no maps between hidden channels, and stay with AdamW.

Why not torch.optim.Muon itself: it takes matrices alone and needs a second optimiser, with a second place in every
checkpoint; it needs torch 2.9; and it multiplies in bfloat16, which on a CPU without bfloat16 units takes 60 times as
long as in float32.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from recurra.layers.feed_forward import LinearWeights
from recurra.ops.cells.gru import GRUCell


class Muon(Optimizer):
    """Muon for the groups of real matrices with `orthogonal` true, AdamW for the others.

    Args:
        groups: parameter groups, each with a key `orthogonal`.
        lr, weight_decay: of groups without their own; the decay is decoupled: weights shrink by lr * decay. lr may be a
            tensor, which a CUDA graph reads.
        momentum: how much of the last update of a matrix enters the next one, in [0, 1).
        nesterov: look ahead along the momentum.
        betas, eps: of AdamW.
        bfloat16: multiply in bfloat16 on a CPU too, as is done on a GPU.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        *,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
        nesterov: bool = True,
        betas: tuple[float, float] = (0.9, 0.98),
        eps: float = 1e-8,
        bfloat16: bool = False,
    ) -> None:
        groups = list(groups)
        self._bfloat16 = bfloat16
        rest = [group for group in groups if not group["orthogonal"]]
        # AdamW writes its options into the same dicts. Without a group of its own it would not start.
        options: dict[str, Any] = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "fused": True}
        self._adamw = AdamW(rest, **options) if rest else None
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov})

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:  # type: ignore[override]
        """Make one update of every parameter that has a gradient; return what `closure` does, if there is one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if group["orthogonal"]:
                self._step_matrices(group)
        if self._adamw is not None:
            # Loading a checkpoint replaces both.
            self._adamw.state = self.state
            self._adamw.param_groups = [group for group in self.param_groups if not group["orthogonal"]]
            self._adamw.step()
        return loss

    def _step_matrices(self, group: dict[str, Any]) -> None:
        alike: dict[tuple[int, ...], list[tuple[nn.Parameter, Tensor]]] = defaultdict(list)
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(parameter.grad)
            momentum = state["momentum_buffer"].lerp_(parameter.grad, 1 - group["momentum"])
            direction = parameter.grad.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
            alike[tuple(parameter.shape)].append((parameter, direction))
        # In float64 as the products of a float are, so that both round alike.
        lr = group["lr"].double() if isinstance(group["lr"], Tensor) else group["lr"]
        for (rows, columns), members in alike.items():
            rate = lr * math.sqrt(max(1.0, rows / columns))
            directions = torch.stack([direction for _, direction in members])
            updates = _orthogonalise(directions, bfloat16=self._bfloat16) * rate
            for (parameter, _), update in zip(members, updates):
                if hasattr(update, "redistribute"):  # over ranks: where rows are few, products are whole on each
                    update = update.redistribute(placements=parameter.placements)  # type: ignore[attr-defined]
                parameter.mul_(1 - lr * group["weight_decay"]).sub_(update)


def _orthogonalise(
    matrices: Float[Tensor, "n rows columns"], *, bfloat16: bool = False
) -> Float[Tensor, "n rows columns"]:
    """Bring every singular value near 1, and keep the singular vectors, by five steps of a Newton-Schulz iteration.

    X <- a X + (b A + c A^2) X with A = X X^T. With the numbers of Jordan et al., chosen for the steepest start,
    singular values end between 0.7 and 1.2 rather than at 1.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrices.bfloat16() if bfloat16 or matrices.is_cuda else matrices
    tall = matrices.size(1) > matrices.size(2)
    if tall:  # the smaller of both Gram matrices
        x = x.mT
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=1e-7)  # no singular value above 1
    for _ in range(5):
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return (x.mT if tall else x).to(matrices.dtype)


def matrix_ids(model: nn.Module) -> set[int]:
    """Collect the `id` of every matrix between hidden channels.

    These are the weights of linear layers and recurrent cells, but for those inside the model's `embedding` and `head`:
    a vocabulary, or a set of classes, is no hidden channel.
    """
    outer = (getattr(model, name, None) for name in ("embedding", "head"))
    ends = {id(parameter) for module in outer if isinstance(module, nn.Module) for parameter in module.parameters()}
    kinds = nn.Linear, LinearWeights, nn.RNNCellBase, GRUCell
    hidden = (module for module in model.modules() if isinstance(module, kinds))
    own = (parameter for module in hidden for parameter in module.parameters(recurse=False) if parameter.ndim == 2)
    return {id(parameter) for parameter in own} - ends
