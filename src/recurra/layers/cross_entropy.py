"""The cross-entropy of every position over a vocabulary, without a copy of the logits in float32."""

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from recurra.checks import require_layout
from recurra.layers.embeddings import IGNORED_TARGET
from recurra.layers.norms import NUMBERS
from recurra.ops._operator import Differentiable, addresses, numba_kernels_take


def cross_entropy(logits: Float[Tensor, "N V"], targets: Int[Tensor, " N"]) -> Float[Tensor, " N"]:
    """Return -log softmax(logits)[target] in nats, in float32 or better; `IGNORED_TARGET` gives 0.

    On a CPU kernels read the logits as they are, float32 or bfloat16, and the backward pass needs nothing beside them
    but a number for each row. It is the reference itself for other types and devices, and under torch.compile,
    torch.func and forward derivatives. All targets are in the vocabulary or ignored.
    """
    if not numba_kernels_take(logits, *NUMBERS):
        return _cross_entropy_reference(logits, targets)
    return _cross_entropy(logits, targets)[0]


def _cross_entropy_reference(logits: Float[Tensor, "N V"], targets: Int[Tensor, " N"]) -> Float[Tensor, " N"]:
    """Compute the same by torch's own function, on a copy in float32."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return functional.cross_entropy(logits, targets.long(), ignore_index=IGNORED_TARGET, reduction="none")


def _forward(keep: bool, logits: Tensor, targets: Tensor) -> tuple[tuple, tuple]:
    """loss = log_sum - x_target; its gradient is softmax(x), less 1 at the target."""
    from recurra.layers._cpu import cross_entropy_kernels

    dense, (rows, columns) = logits.detach().contiguous(), logits.shape
    largest, sums = (dense.new_empty(rows, dtype=torch.float32) for _ in range(2))
    cross_entropy_kernels(NUMBERS[dense.dtype]).forward(
        *addresses(dense, largest, sums), rows, columns, jobs=rows, work=dense.numel()
    )
    # Kept apart: in their sum, large logits would leave the logarithm few digits.
    log_sums = sums.log()
    counts = targets != IGNORED_TARGET
    places = targets.where(counts, 0).long()[:, None]  # PyTorch 2.6 takes no int32
    chosen = dense.gather(1, places)[:, 0].float()
    return ((largest - chosen + log_sums).where(counts, 0.0),), (logits, targets, largest, log_sums)


def _backward(gradients: tuple, saved: tuple, needs: tuple) -> tuple[Tensor, None]:
    from recurra.layers._cpu import cross_entropy_kernels

    (gradient,), (logits, targets, largest, log_sums) = gradients, saved
    dense, (rows, columns) = logits.contiguous(), logits.shape
    for name, tensor in {"largest": largest, "log_sums": log_sums, "gradient": gradient}.items():
        require_layout(name, tensor, (rows,), torch.float32, torch.device("cpu"))  # hooks may have changed it
    largest, log_sums = largest.contiguous(), log_sums.contiguous()
    counts = targets != IGNORED_TARGET
    scales, found = gradient.where(counts, 0.0).contiguous(), torch.empty_like(dense)
    cross_entropy_kernels(NUMBERS[dense.dtype]).backward(
        *addresses(dense, largest, log_sums, scales, found), rows, columns, jobs=rows, work=dense.numel()
    )
    # By itself, because softmax - 1 of a probable target would lose digits in bfloat16.
    at = (torch.arange(rows, device="cpu"), targets.where(counts, 0))
    less = torch.expm1(dense[at].float() - largest - log_sums) * scales
    # scatter_ would copy all logits to float32 and back if they are bfloat16
    return found.index_put_(at, less.to(found.dtype)), None


_cross_entropy = Differentiable(
    _forward, _backward, n_inputs=2, reference=lambda *inputs: (_cross_entropy_reference(*inputs),)
)
