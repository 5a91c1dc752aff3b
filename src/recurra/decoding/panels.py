"""How rounded weights lie in memory: in panels of 64 outputs, in the order in which the kernels read them.

    bfloat16   (panels, n_in, 64)        the 64 weights of one input side by side
    int8       (panels, quads, 64, 4)    for each 4 inputs, the 4 weights of one output after those of the other
    int4       (panels, groups, 1280)    bytes; for each 32 inputs 64 scales and 64 minima, float16, then four times 64
                                         words: an output's codes of 4 inputs, and above each the code 4 inputs later

A last panel or group that is not full is filled with zeros. float32 weights stay in rows, shared with the model.
"""

import torch
from jaxtyping import Float, UInt8
from torch import Tensor
from torch.nn import functional

from recurra.checks import sentence

PANEL = 64
"""Outputs in a panel: one byte for each fills a cache line."""
QUAD = 4
"""Inputs whose weights lie side by side in int8."""
GROUP = 32
"""Inputs of one output that share a scale and a minimum in int4."""
GROUP_BYTES = 2 * 2 * PANEL + GROUP // 2 * PANEL
_CODES = 16


def to_panels(rows: Tensor) -> Tensor:
    """Turn (n_out, n_in) into (panels, n_in, 64)."""
    n_out, n_in = rows.shape
    full = functional.pad(rows, (0, 0, 0, -n_out % PANEL))
    panels = full.view(len(full) // PANEL, PANEL, n_in).transpose(1, 2)
    return panels.clone(memory_format=torch.contiguous_format)


def from_panels(panels: Tensor, n_out: int) -> Tensor:
    """Turn (panels, n_in, 64) into (n_out, n_in)."""
    return panels.transpose(1, 2).flatten(0, 1)[:n_out]


def to_quads(rows: Tensor) -> Tensor:
    """Turn (n_out, n_in) into (panels, quads, 64, 4)."""
    full = functional.pad(rows, (0, -rows.shape[1] % QUAD, 0, -rows.shape[0] % PANEL))
    quads = full.view(len(full) // PANEL, PANEL, full.shape[1] // QUAD, QUAD).transpose(1, 2)
    return quads.clone(memory_format=torch.contiguous_format)


def from_quads(quads: Tensor, n_out: int, n_in: int) -> Tensor:
    """Turn (panels, quads, 64, 4) into (n_out, n_in)."""
    return quads.transpose(1, 2).flatten(2).flatten(0, 1)[:n_out, :n_in]


def to_int4(weight: Float[Tensor, "n_out n_in"]) -> UInt8[Tensor, "panels groups bytes"]:
    """Quantise: in a group, value = minimum + scale * code, with codes from 0 to 15.

    Raises:
        ValueError: a weight is not finite, or beyond float16.
    """
    n_out, n_in = weight.shape
    n_groups, n_panels = -(-n_in // GROUP), -(-n_out // PANEL)
    # the missing inputs repeat the last one, so they do not widen the group's range
    padded = torch.cat((weight, weight[:, -1:].expand(-1, n_groups * GROUP - n_in)), 1) if n_in else weight
    groups = padded.reshape(n_out, n_groups, GROUP)
    minimum = groups.amin(2).half()
    scale = ((groups.amax(2) - minimum.float()) / (_CODES - 1)).half()
    if not (minimum.isfinite().all() and scale.isfinite().all()):
        came = f"up to {weight.abs().max():.3g} in size"
        raise ValueError(sentence("linear.weight", came, "finite numbers within float16, for int4", "use int8"))
    steps = scale.float().unsqueeze(2)
    codes = ((groups - minimum.float().unsqueeze(2)) / steps.where(steps > 0, 1.0)).round().clamp(0, _CODES - 1)
    codes = to_panels(codes.to(torch.uint8).flatten(1)).view(n_panels, n_groups, GROUP // 8, 2, 4, PANEL)
    words = (codes[..., 0, :, :] | codes[..., 1, :, :] << 4).transpose(3, 4).flatten(2)  # 4 bytes each
    numbers = [to_panels(part).view(torch.uint8) for part in (scale, minimum)]
    return torch.cat((*numbers, words), 2).contiguous()


def from_int4(stored: UInt8[Tensor, "panels groups bytes"], n_out: int, n_in: int) -> Float[Tensor, "n_out n_in"]:
    """Give the weights that `to_int4` kept."""
    n_panels, n_groups, _ = stored.shape
    scale, minimum = stored[..., : 4 * PANEL].contiguous().view(torch.float16).float().chunk(2, 2)
    words = stored[..., 4 * PANEL :].view(n_panels, n_groups, GROUP // 8, PANEL, 4).transpose(3, 4)
    codes = torch.stack((words & 15, words >> 4), 3).view(n_panels, n_groups, GROUP, PANEL)
    values = minimum.unsqueeze(2) + scale.unsqueeze(2) * codes
    return from_panels(values.flatten(1, 2), n_out)[:, :n_in]
