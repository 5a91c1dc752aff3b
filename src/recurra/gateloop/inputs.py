"""The checks that the operators of this package share: types, dimensions, devices and shapes of q, k, v and a."""

from torch import Tensor

from recurra.checks import kind_of, require_tensor, sentence


def check_numbers(name: str, tensor: Tensor, like: Tensor, dimensions: str) -> None:
    """Refuse anything but floating-point or complex numbers in four dimensions on the device of `like`.

    Raises:
        TypeError: it is not a tensor, or of another type.
        ValueError: it has other dimensions, or is on another device.
    """
    require_tensor(name, tensor)
    if not (tensor.is_floating_point() or tensor.is_complex()):
        raise TypeError(sentence(name, kind_of(tensor), "floating-point or complex numbers"))
    if tensor.dim() != 4:
        raise ValueError(sentence(name, kind_of(tensor), dimensions))
    if tensor.device != like.device:
        raise ValueError(sentence(name, kind_of(tensor), f"a tensor on {like.device}, as q"))


def check_shape(name: str, tensor: Tensor, *shapes: tuple[int, ...]) -> None:
    """Refuse a tensor of none of these shapes. Raises ValueError."""
    if tuple(tensor.shape) not in shapes:
        raise ValueError(sentence(name, kind_of(tensor), " or ".join(map(str, shapes))))


def check_inputs(q: Tensor, k: Tensor, v: Tensor, a: Tensor, n_steps: int | None = None) -> None:
    """Refuse q, k, v and a that do not belong together.

    Args:
        q: (B, L, H, d_qk).
        k, v, a: (B, n_steps, H, ...), of d_qk, d_v, and 1 or d_qk channels.
        n_steps: L if None.

    Raises:
        TypeError: one is not a tensor of floating-point or complex numbers.
        ValueError: one has another shape, or is on another device than q.
    """
    require_tensor("q", q)
    for name, tensor in (("q", q), ("k", k), ("v", v), ("a", a)):
        check_numbers(name, tensor, q, "(B, L, H, d)")
    batch, length, heads, d_qk = q.shape
    steps = (batch, length if n_steps is None else n_steps, heads)
    check_shape("k", k, (*steps, d_qk))
    check_shape("v", v, (*steps, v.shape[3]))
    check_shape("a", a, (*steps, 1), (*steps, d_qk))
