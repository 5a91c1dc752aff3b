"""One random call of an operator: its tensors in any memory layout, and the comparison with plain torch."""

import math
import random

import torch
from torch import Tensor

REFUSALS = (ValueError, TypeError, RuntimeError)
TOLERANCES = {torch.float32: 3e-5, torch.float64: 1e-11, torch.bfloat16: 2e-2}


def wide(x: Tensor) -> Tensor:
    """The same numbers in double precision, one after the other."""
    return x.detach().to(torch.complex128 if x.is_complex() else torch.float64).resolve_conj().clone().contiguous()


class Case:
    """One call: what was drawn for it, in words. The same `seed` draws the same call."""

    def __init__(self, seed: str, *words):
        self.drawn, self.words = random.Random(seed), list(map(str, words))
        self.random = torch.Generator().manual_seed(self.drawn.getrandbits(31))

    def choose(self, name, choices):
        chosen = self.drawn.choice(list(choices))
        self.words.append(f"{name}={chosen}")
        return chosen

    def size(self, name, largest):
        """Up to `largest`, now and then 0."""
        return self.choose(name, [*range(1, largest + 1)] * 3 + [0])

    def tensor(self, name, shape, dtype=torch.float32, gate=False):
        """Draw a tensor whose dimensions lie in any order, with gaps, or share memory."""
        order = self.drawn.sample(range(len(shape)), len(shape))
        steps = [self.drawn.choice([1, 1, 1, 2, 0]) for _ in shape]
        offset = self.drawn.randrange(4)
        kept = [1 if step == 0 else n for n, step in zip(shape, steps)]
        strides, stride = [0] * len(shape), 1
        for dim in reversed(order):
            strides[dim] = stride * max(1, steps[dim])
            stride *= max(1, kept[dim]) * max(1, steps[dim])
        memory = torch.full((offset + stride + 64,), math.nan, dtype=dtype)
        dense = memory.as_strided(kept, strides, offset + 16)
        kind = torch.complex128 if dtype.is_complex else torch.float64
        numbers = torch.randn(kept, dtype=kind, generator=self.random)
        dense.copy_(0.6 * numbers.tanh() if gate else numbers)
        x = dense.expand(shape)
        turned = self.drawn.choice(["", "", "", "conj", "neg"])
        if turned == "conj" and dtype.is_complex:
            x = x.conj()
        elif turned == "neg":
            x = torch._neg_view(x)
        number = "" if dtype == torch.float32 else str(dtype).removeprefix("torch.")
        self.words.append(f"{name}{tuple(shape)}:{x.stride()}+{offset}{turned}{number}")
        return x

    def unlike(self, x, other_type=torch.int64):
        """Draw a tensor that differs from x in one thing."""
        kind = self.choose("by", ("size", "rank", "type", "device"))
        if kind == "type":
            return torch.ones(x.shape, dtype=other_type)
        if kind == "device":
            return x.to("meta")
        if kind == "rank":
            return torch.zeros((*x.shape, 1), dtype=x.dtype)
        changed = self.choose("dimension", range(x.dim()))
        larger = self.choose("to", ("one", "more"))
        sizes = [n if dim != changed else 1 if larger == "one" and n != 1 else n + 1 for dim, n in enumerate(x.shape)]
        return torch.zeros(sizes, dtype=x.dtype)

    def state(self, name, shape, dtype, other_type=torch.int64):
        """Draw a state, now and then one that does not fit. Returns (state, whether it fits)."""
        x = self.tensor(name, shape, dtype)
        fits = self.choose("fits", (True, True, True, False))
        return (x, True) if fits else (self.unlike(x, other_type), False)

    def refused(self, call):
        """The call must raise."""
        self.say()
        try:
            call()
        except REFUSALS:
            return
        raise AssertionError(f"not refused: {' '.join(self.words)}")

    def say(self):
        print("case", *self.words, flush=True)

    def near(self, name, mine, right, tolerance=None):
        assert mine.shape == right.shape, f"{name} is {mine.shape}; expected {right.shape}"
        if not mine.numel():
            return
        tolerance = tolerance or TOLERANCES[mine.dtype.to_real() if mine.is_complex() else mine.dtype]
        distance, size = (mine.to(right.dtype) - right).abs().max().item(), right.abs().max().item()
        assert distance <= tolerance * (1 + size), f"{name} is off by {distance:.1e} of {size:.1e}"

    def same(self, function, reference, inputs, tolerance=None):
        """Outputs are the reference's, and so are the gradients of all inputs; without a graph, too."""
        self.say()
        exact = [wide(x).requires_grad_() for x in inputs]
        expected = reference(*exact)
        with torch.no_grad():
            for i, (y, right) in enumerate(zip(function(*inputs), expected, strict=True)):
                self.near(f"output {i} without a graph", y, right, tolerance)
        leaves = [x.detach().requires_grad_() for x in inputs]
        outputs = function(*leaves)
        for i, (y, right) in enumerate(zip(outputs, expected, strict=True)):
            self.near(f"output {i}", y, right, tolerance)
        incoming = [self.tensor(f"dy{i}", y.shape, y.dtype) for i, y in enumerate(outputs)]
        self.say()
        exact_incoming = [wide(dy).to(y.dtype) for dy, y in zip(incoming, expected)]
        gradients = torch.autograd.grad(outputs, leaves, incoming, materialize_grads=True)
        right = torch.autograd.grad(expected, exact, exact_incoming, materialize_grads=True)
        for i, (dx, exact_dx) in enumerate(zip(gradients, right)):
            self.near(f"gradient {i}", dx, exact_dx, tolerance)
