"""`check_contract`: whether a module of your own keeps the contract, `y, state = module(x, state)`."""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

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
      sequence is cut, at the start of a stream and in the middle of one. A piece may have no steps.
    - Padding under `mask` changes nothing, if `forward` takes a mask.

    The module is in evaluation mode meanwhile, so that dropout is off.

    Args:
        module: a layer or model that takes any number of steps. Check it in float64, or in float32.
        x: its input, (B, L, ...), at least two sequences of four steps. If the module has windows or segments, L should
            exceed them.
        tolerance: the largest difference allowed between two tensors, relative to their largest finite number (for
            gradients, at least its power 1.5 relative to the largest of all gradients: some are zero but for rounding).
            None: the square root of the epsilon of the module's floating-point type.

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
        given = self.state_of_another_sequence()
        self.check_values(given)
        self.check_independence(given)
        for place, state in (("the start", None), ("the middle", given)):
            self.check_cuts(place, state)
            if "mask" in inspect.signature(self.module.forward).parameters:
                self.check_padding(place, state)

    def state_of_another_sequence(self) -> Any:
        with torch.no_grad():
            return states.map_tensors(Tensor.clone, self.module(self.x.flip(0, 1))[1])

    def require_same(self, found: Any, expected: Any, sentence: str, *, least: float = 0.0) -> None:
        """Require equal leaves of two structures, tensors up to rounding, or up to `least`."""
        leaves = tree_leaves(found), tree_leaves(expected)
        assert len(leaves[0]) == len(leaves[1]), f"{sentence}: {len(leaves[0])} values instead of {len(leaves[1])}"
        for one, other in zip(*leaves):
            if not isinstance(other, Tensor):
                assert one == other, f"{sentence}: {one!r} instead of {other!r}"
                continue
            forms = [(tuple(x.shape), x.dtype) for x in (one, other)]
            assert forms[0] == forms[1], f"{sentence}: it is {forms[0]} instead of {forms[1]}"
            one, other = (x.detach().to_dense() for x in (one, other))
            if not _is_differentiable(other):
                assert torch.equal(one, other), sentence
                continue
            differs = (one != other) & ~(one.isnan() & other.isnan())
            wrong = _largest((one - other)[differs])
            most = max(self.tolerance * _largest(other[other.isfinite()]), least)
            assert wrong <= most, f"{sentence}: by up to {wrong:.2g}; rounding explains {most:.2g}"

    # --- calls ---

    def check_forms(self) -> None:
        result = self.module(self.x)
        is_pair = isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], Tensor)
        assert is_pair, f"module(x) returns a {type(result).__name__}; expected a pair, the tensor y and the state"
        y, state = result
        batch_and_steps = tuple(self.x.shape[:2])
        assert y.shape[:2] == batch_and_steps, f"y is of shape {tuple(y.shape)}; expected {batch_and_steps} first"
        shapes = [tuple(part.shape) for part in states.tensors(states.map_tensors(Tensor.detach, state))]
        assert shapes, "the state has no tensors; expected at least one"
        has_batch = all(shape[:1] == batch_and_steps[:1] for shape in shapes)
        assert has_batch, f"the state's tensors are of shapes {shapes}; expected the batch, {batch_and_steps[0]}, first"

    def check_values(self, given: Any) -> None:
        x, before = self.x.clone(), states.map_tensors(Tensor.clone, given)
        kept = {name: part.clone() for name, part in self.module.state_dict().items() if isinstance(part, Tensor)}
        first, later = self.module(x)[0], self.module(x, given)[0]
        self.require_same(given, before, "a call changes the state that it is given")
        self.require_same(x, self.x, "a call changes its input")
        self.module(self.x[:1, :2])
        for y, state in ((first, None), (later, given)):
            self.require_same(self.module(x, state)[0], y, "y changes if the module is called in between")
        now = self.module.state_dict()
        for name, part in kept.items():
            self.require_same(now[name], part, f"a call changes {name} of the module")

    def check_independence(self, given: Any) -> None:
        half, row = self.length // 2, slice(1, 2)
        other = torch.cat([self.x[:, :half], self.x.roll(1, 0)[:, half:]], 1)
        y, last = self.module(self.x, given)
        self.require_same(self.module(other, given)[0][:, :half], y[:, :half], "y depends on later steps")
        alone, alone_last = self.module(self.x[row], states.select(given, row))
        self.require_same(alone, y[row], "y depends on other sequences of the batch")
        self.require_same(alone_last, states.select(last, row), "the state depends on other sequences of the batch")

    # --- cuts ---

    def check_cuts(self, place: str, given: Any) -> None:
        length, whole = self.length, self.run([self.length], given)
        gradients = [tensor.to_dense() for name, tensor in whole.items() if name.startswith("the gradient")]
        rounding = self.tolerance**1.5 * max(map(_largest, gradients), default=0.0)
        for pieces, cut in (
            ([1] * length, "into single steps"),
            ([length - 1, 1], "before its last step"),
            ([1, length // 2, length - length // 2 - 1], "into three pieces"),
            ([2, 0, length - 2], "around a piece without steps"),
        ):
            where = f"changes if a sequence at {place} of a stream is cut {cut}"
            parts = self.run(pieces, given)
            assert parts.keys() == whole.keys(), f"the number of tensors in the state {where}"
            for name, found in parts.items():
                least = rounding if name.startswith("the gradient") else 0.0
                self.require_same(found, whole[name], f"{name} {where}", least=least)

    def run(self, pieces: Sequence[int], given: Any) -> dict[str, Any]:
        """Return the output, the last state, and the gradients of a loss over both."""
        state = states.map_tensors(lambda part: part.clone().requires_grad_(_is_differentiable(part)), given)
        x = self.x.clone().requires_grad_(_is_differentiable(self.x))
        leaves = {"the input": x, **dict(self.module.named_parameters())}
        leaves |= {f"tensor {number} of the given state": part for number, part in enumerate(states.tensors(state))}
        outputs = []
        for piece in x.split(list(pieces), 1):
            try:
                y, state = self.module(piece, state)
            except Exception as error:
                if piece.shape[1]:
                    raise
                raise AssertionError(f"a piece without steps raises {type(error).__name__}: {error}") from error
            outputs.append(y)
        results = {"y": torch.cat(outputs, 1)}
        results |= {f"leaf {number} of the last state": part for number, part in enumerate(tree_leaves(state))}
        tensors = [part for part in results.values() if isinstance(part, Tensor) and part.requires_grad]
        leaves = {f"the gradient of {name}": leaf for name, leaf in leaves.items() if leaf.requires_grad}
        if tensors and leaves:
            losses = [torch.where(part.isfinite(), _weights_of(part) * part, 0).sum().real for part in tensors]
            loss, parts = torch.stack(losses).sum(), list(leaves.values())
            gradients = torch.autograd.grad(loss, parts, allow_unused=True, materialize_grads=True)
            results |= dict(zip(leaves, gradients))
        return results

    # --- padding ---

    def check_padding(self, place: str, given: Any) -> None:
        half, row = self.length // 2, slice(1, 2)
        mask = torch.ones(self.x.shape[:2], dtype=torch.bool, device=self.x.device)
        mask[row, :half] = False
        y, last = self.module(self.x, given, mask=mask)
        alone, alone_last = self.module(self.x[row, half:], None if given is None else states.select(given, row))
        where = f"depends on the padding before a sequence at {place} of a stream"
        self.require_same(y[row, half:], alone, f"y {where}")
        self.require_same(states.split(last)[1], alone_last, f"the state {where}")


def _is_differentiable(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _largest(tensor: Tensor) -> float:
    """Return the largest magnitude; NaN if there is one."""
    return tensor.abs().max().item() if tensor.numel() else 0.0


def _weights_of(tensor: Tensor) -> Tensor:
    """Draw weights for a loss, the same for all tensors of a shape."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype, device="cpu").to(tensor.device)
