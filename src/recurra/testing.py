"""`check_contract`: whether a module of your own keeps the contract, `y, state = module(x, state)`."""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from recurra import state as states
from recurra.checks import require

__all__ = ["check_contract"]


def check_contract(module: nn.Module, x: Tensor, *, tolerance: float | None = None) -> None:
    """Check that a stream can be cut anywhere, and what else the contract promises.

    In this order:

    - A state is a pytree of tensors whose first dimension is the batch.
    - A call changes neither its arguments nor the module, and depends on nothing else.
    - Outputs depend neither on later steps nor on other sequences of the batch.
    - Outputs, the last state and the gradients of the parameters, the given state and x are the same however the
      sequence is cut, at the start of a stream and in the middle of one.
    - Padding under `mask` changes nothing, if `forward` takes a mask.

    The module is in evaluation mode meanwhile, so that dropout is off.

    Args:
        module: a layer or model that takes any number of steps.
        x: its input, (B, L, ...), at least two sequences of four steps. If the module has windows or segments, L should
            exceed them.
        tolerance: the largest difference allowed between two tensors, relative to their largest number. None: the
            square root of the epsilon of the module's floating-point type. float64 is the strictest.

    Raises:
        AssertionError: the module breaks the contract; the message says how.
        TypeError: a state has something other than tensors, numbers and None in it.
        ValueError: x is too small.
    """
    require(x.dim() > 1 and x.shape[0] > 1 and x.shape[1] > 3, "x", tuple(x.shape), "(B, L, ...), B >= 2, L >= 4")
    if tolerance is None:
        kinds = [tensor.dtype for tensor in (*module.parameters(), x) if tensor.is_floating_point()]
        tolerance = torch.finfo(kinds[0] if kinds else torch.float32).eps ** 0.5
    modes = {part: part.training for part in module.modules()}
    module.eval()
    try:
        with torch.enable_grad():
            _Contract(module, x.detach(), tolerance).check()
    finally:
        for part, mode in modes.items():
            part.training = mode


class _Contract:
    def __init__(self, module: nn.Module, x: Tensor, tolerance: float) -> None:
        self.module, self.x, self.tolerance = module, x, tolerance
        self.length = x.shape[1]

    def check(self) -> None:
        self.check_forms()
        self.check_values()
        self.check_independence()
        self.check_cuts("the start", None)
        self.check_cuts("the middle", self.state_of_another_sequence())
        if "mask" in inspect.signature(self.module.forward).parameters:
            self.check_padding()

    def require_same(self, found: Tensor, expected: Tensor, sentence: str) -> None:
        shapes = tuple(found.shape), tuple(expected.shape)
        assert shapes[0] == shapes[1], f"{sentence}: its shape is {shapes[0]} instead of {shapes[1]}"
        found, expected = found.detach(), expected.detach()
        if expected.is_floating_point() or expected.is_complex():
            most = self.tolerance * max(expected.abs().max().item() if expected.numel() else 0.0, 1e-30)
            wrong = (found - expected).abs().max().item() if expected.numel() else 0.0
            assert wrong <= most, f"{sentence}: by up to {wrong:.2g}; rounding explains {most:.2g}"
        else:
            assert torch.equal(found, expected), sentence

    def state_of_another_sequence(self) -> Any:
        with torch.no_grad():
            return states.map_tensors(Tensor.clone, self.module(self.x.flip(0, 1))[1])

    # --- calls ---

    def check_forms(self) -> None:
        result = self.module(self.x)
        is_pair = isinstance(result, tuple) and len(result) == 2
        assert is_pair, f"module(x) returns a {type(result).__name__}; expected a pair, y and the state"
        y, state = result
        batch_and_steps = tuple(self.x.shape[:2])
        assert y.shape[:2] == batch_and_steps, f"y is of shape {tuple(y.shape)}; expected {batch_and_steps} first"
        shapes = [tuple(part.shape) for part in states.tensors(states.map_tensors(Tensor.detach, state))]
        assert shapes, "the state has no tensors; expected at least one"
        has_batch = all(shape[:1] == batch_and_steps[:1] for shape in shapes)
        assert has_batch, f"the state's tensors are of shapes {shapes}; expected the batch, {batch_and_steps[0]}, first"

    def check_values(self) -> None:
        given, x = self.state_of_another_sequence(), self.x.clone()
        before = states.map_tensors(Tensor.clone, given)
        first, later = self.module(x)[0], self.module(x, given)[0]
        is_same = all(map(torch.equal, states.tensors(given), states.tensors(before)))
        assert is_same, "a call changes the state that it is given"
        assert torch.equal(x, self.x), "a call changes its input"
        self.module(self.x[:1, :2])
        for y, state in ((first, None), (later, given)):
            self.require_same(self.module(x, state)[0], y, "y changes if the module is called in between")

    def check_independence(self) -> None:
        half = self.length // 2
        other = torch.cat([self.x[:, :half], self.x.roll(1, 0)[:, half:]], 1)
        given, row = self.state_of_another_sequence(), slice(1, 2)
        y, last = self.module(self.x, given)
        self.require_same(self.module(other, given)[0][:, :half], y[:, :half], "y depends on later steps")
        alone, alone_last = self.module(self.x[row], states.select(given, row))
        self.require_same(alone, y[row], "y depends on other sequences of the batch")
        self.require_all_same(alone_last, states.select(last, row), "depends on other sequences of the batch")

    def require_all_same(self, found: Any, expected: Any, predicate: str) -> None:
        for number, (one, other) in enumerate(zip(states.tensors(found), states.tensors(expected), strict=True)):
            self.require_same(one, other, f"tensor {number} of the last state {predicate}")

    # --- cuts ---

    def check_cuts(self, place: str, given: Any) -> None:
        length, whole = self.length, self.run([self.length], given)
        for pieces, cut in (
            ([1] * length, "into single steps"),
            ([length - 1, 1], "before its last step"),
            ([1, length // 2, length - length // 2 - 1], "into three pieces"),
            ([2, 0, length - 2], "around a piece without steps"),
        ):
            for name, found in self.run(pieces, given).items():
                self.require_same(
                    found, whole[name], f"{name} changes if a sequence at {place} of a stream is cut {cut}"
                )

    def run(self, pieces: Sequence[int], given: Any) -> dict[str, Tensor]:
        """Return the output, the last state, and the gradients of a loss over both."""
        state = states.map_tensors(lambda part: part.clone().requires_grad_(_is_differentiable(part)), given)
        x = self.x.clone().requires_grad_(_is_differentiable(self.x))
        leaves = {"x": x, **dict(self.module.named_parameters())}
        leaves |= {f"tensor {number} of the given state": part for number, part in enumerate(states.tensors(state))}
        outputs = []
        for piece in x.split(list(pieces), 1):
            y, state = self.module(piece, state)
            outputs.append(y)
        results = {"y": torch.cat(outputs, 1)}
        results |= {f"tensor {number} of the last state": part for number, part in enumerate(states.tensors(state))}
        losses = [(_weights_of(part) * part).sum().real for part in results.values() if part.requires_grad]
        leaves = {f"the gradient of {name}": leaf for name, leaf in leaves.items() if leaf.requires_grad}
        if losses and leaves:
            loss, parts = torch.stack(losses).sum(), list(leaves.values())
            gradients = torch.autograd.grad(loss, parts, allow_unused=True, materialize_grads=True)
            results |= dict(zip(leaves, gradients))
        return results

    # --- padding ---

    def check_padding(self) -> None:
        half, row = self.length // 2, slice(1, 2)
        mask = torch.ones(self.x.shape[:2], dtype=torch.bool, device=self.x.device)
        mask[row, :half] = False
        y, last = self.module(self.x, mask=mask)
        alone, alone_last = self.module(self.x[row, half:])
        self.require_same(y[row, half:], alone, "y depends on the padding before a sequence")
        self.require_all_same(states.split(last)[1], alone_last, "depends on the padding before a sequence")


def _is_differentiable(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _weights_of(tensor: Tensor) -> Tensor:
    """Draw weights for a loss, the same for all tensors of a shape."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype, device="cpu").to(tensor.device)
