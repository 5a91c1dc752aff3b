"""The operators of an exported graph, and their ONNX form: recurrences become the operator Scan.

recurra::complex_scan     h_t = a_t h_{t-1} + b_t in planes (B, L, D) and (B, D); it stands for a complex
                          recurra::linear_scan in graphs of real numbers
recurra::linear_scan      the real scan
recurra::gate_loop_fused  GateLoop with one channel a head
"""

import torch
from torch import Tensor

_library = torch.library.Library("recurra", "FRAGMENT")
_library.define(
    "complex_scan(Tensor a_re, Tensor a_im, Tensor b_re, Tensor b_im, Tensor h0_re, Tensor h0_im) -> (Tensor, Tensor)"
)


def _complex_scan(
    a_re: Tensor, a_im: Tensor, b_re: Tensor, b_im: Tensor, h0_re: Tensor, h0_im: Tensor
) -> tuple[Tensor, Tensor]:
    a, b, h0 = (torch.complex(re, im) for re, im in ((a_re, a_im), (b_re, b_im), (h0_re, h0_im)))
    h = torch.ops.recurra.linear_scan(a, b, h0, False)
    return h.real.contiguous(), h.imag.contiguous()


_library.impl("complex_scan", _complex_scan, "CPU")


@torch.library.register_fake("recurra::complex_scan")
def _complex_scan_fake(
    a_re: Tensor, a_im: Tensor, b_re: Tensor, b_im: Tensor, h0_re: Tensor, h0_im: Tensor
) -> tuple[Tensor, Tensor]:
    return b_re.new_empty(b_re.shape), b_re.new_empty(b_re.shape)
