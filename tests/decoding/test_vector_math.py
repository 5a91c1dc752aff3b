"""The functions of vectors against float64, over wide ranges and at the edges of float32."""

import math

import pytest
import torch
from torch.nn import functional

from recurra.decoding._instructions import FUNCTIONS
from recurra.decoding._tiles import apply
from recurra.ops._toolkit.launch import compile_function
from recurra.ops._toolkit.vectors import WIDTH, Lanes, load, store

MANY, ONE = Lanes("float32", WIDTH), Lanes("float32", 1)


@compile_function
def _run(code, x, y, out, n):
    i = 0
    while i + WIDTH <= n:
        store(out, i, MANY, apply(code, load(x, i, MANY), load(y, i, MANY)))
        i += WIDTH
    while i < n:
        store(out, i, ONE, apply(code, load(x, i, ONE), load(y, i, ONE)))
        i += 1


def run(name, x, y=None):
    y, out = x if y is None else y, torch.empty_like(x)
    _run(FUNCTIONS.index(name), x.data_ptr(), y.data_ptr(), out.data_ptr(), len(x))
    return out


@pytest.fixture(scope="module")
def wide():
    """Numbers of every size up to some hundred, and a fine grid where exp is a float32."""
    drawn = [torch.randn(20_000) * size for size in (1e-30, 1e-6, 1e-2, 0.3, 1, 3, 10, 30, 100)]
    return torch.cat([*drawn, torch.linspace(-90, 90, 50_001)])


def relative(name, x, expected, above=1e-37):
    error = (run(name, x).double() - expected).abs() / expected.abs()
    return error[(expected.abs() > above) & (expected.abs() < 3.4e38)].max().item()


def test_relative_errors(wide):
    x = wide.double()
    assert relative("exp", wide, x.exp()) < 1.2e-7
    assert relative("sigmoid", wide, x.sigmoid()) < 1.8e-7
    assert relative("tanh", wide, x.tanh()) < 1.8e-7
    assert relative("softplus", wide, functional.softplus(x, threshold=1000)) < 2.2e-7
    assert relative("expm1", wide, x.expm1()) < 4e-7
    assert relative("sqrt", wide.abs(), x.abs().sqrt()) < 6e-8


def test_gelu_and_silu_beside_the_size_of_their_input(wide):
    x = wide.double()
    scale = x.abs().clamp_min(1)
    for name, expected in {
        "gelu": functional.gelu(x),
        "gelu_tanh": functional.gelu(x, approximate="tanh"),
        "silu": functional.silu(x),
    }.items():
        assert ((run(name, wide).double() - expected).abs() / scale).max() < 1.6e-7


@pytest.mark.parametrize("name", ["sin", "cos"])
def test_sine_and_cosine_of_any_angle(name, wide):
    function = getattr(torch, name)
    for x in (wide, torch.rand(50_000) * 2**30, -torch.rand(50_000) * 1e5, torch.arange(-2000, 2000) * math.pi / 4):
        x = x.float()
        assert (run(name, x).double() - function(x.double())).abs().max() < 9e-8
    assert (run(name, torch.randn(1000) * 1e36).abs() <= 1.0001).all()


def test_what_two_numbers_make():
    x, y = torch.randn(2, 37)
    for name in ("add", "sub", "mul", "div", "maximum", "minimum"):
        assert torch.equal(run(name, x, y), getattr(torch, name)(x, y))
    for name in ("neg", "abs"):
        assert torch.equal(run(name, x), getattr(torch, name)(x))
    assert torch.equal(run("copy", x, y), x)
    nan = torch.tensor([math.nan, 1.0, math.nan])
    for name in ("maximum", "minimum"):
        assert run(name, nan, nan.flip(0)).isnan().tolist() == [True, False, True]
        assert run(name, torch.tensor([1.0]), torch.tensor([math.nan])).isnan().all()


@pytest.mark.parametrize("name", ["exp", "expm1", "sin", "cos", "sigmoid", "tanh", "silu", "gelu", "gelu_tanh", "sqrt"])
@pytest.mark.parametrize("copies", [1, WIDTH])
def test_the_edges_are_those_of_torch(name, copies):
    at = [math.nan, math.inf, -math.inf, 0.0, -0.0, 1e30, -1e30, 1e-42, -120.0, 120.0]
    if name in ("sin", "cos"):
        at = [math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-42]
    x = torch.tensor(at).repeat_interleave(copies)
    if name in ("gelu", "gelu_tanh", "silu"):
        x = x[x != -math.inf]  # torch makes NaN or -0 of it, as it rounds
        expected = getattr(functional, name.removesuffix("_tanh"))
        right = expected(x.double(), approximate="tanh") if name == "gelu_tanh" else expected(x.double())
    else:
        right = getattr(torch, name)(x.double())
    torch.testing.assert_close(run(name, x), right.float(), rtol=2e-7, atol=1e-37, equal_nan=True)
