"""Scans over any associative operator: every method, every length, operators that do not commute."""

import doctest
import inspect
import itertools
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import recurra.ops.scan.reference as associative
from recurra import linear_scan
from recurra.ops.scan.reference import associative_scan, linear_recurrence, matrix_recurrence

METHODS = ("blelloch", "hillis_steele", "sequential")


class Text(NamedTuple):
    """Strings as rows of letters and their lengths; joining them is associative and does not commute."""

    letters: torch.Tensor  # (B, L, capacity), 0 at empty places
    length: torch.Tensor  # (B, L)

    @classmethod
    def of_single_letters(cls, length):
        letters = torch.zeros(2, length, length, dtype=torch.int64)
        letters[..., 0] = torch.arange(1, 2 * length + 1).view(2, length)
        return cls(letters, torch.ones(2, length, dtype=torch.int64))


def join(earlier, later):
    room = torch.arange(earlier.letters.shape[-1])
    moved = (room - earlier.length[..., None]).clamp_min(0)
    tail = torch.where(room >= earlier.length[..., None], later.letters.gather(-1, moved), 0)
    return Text(earlier.letters + tail, earlier.length + later.length)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_every_length_with_an_operator_that_does_not_commute(method, reverse):
    """Each result must be the letters up to its place, in order, each exactly once."""
    for length in (*range(1, 10), 16, 17, 33):
        scanned = associative_scan(join, Text.of_single_letters(length), method=method, reverse=reverse)
        assert isinstance(scanned, Text)
        letters = torch.arange(1, 2 * length + 1).view(2, length)
        for t in range(length):
            expected = letters[:, t:].flip(1) if reverse else letters[:, : t + 1]
            n = expected.shape[1]
            assert (scanned.length[:, t] == n).all()
            assert torch.equal(scanned.letters[:, t, :n], expected), (length, t)
            assert scanned.letters[:, t, n:].count_nonzero() == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_linear_recurrence(method, dtype, gates):
    for length, reverse in itertools.product((1, 2, 3, 17, 64, 100), (False, True)):
        a, b = gates(2, length, 5, dtype=dtype), torch.randn(2, length, 5, dtype=dtype)
        product, h = associative_scan(linear_recurrence, (a, b), method=method, reverse=reverse)
        torch.testing.assert_close(h, linear_scan(a, b, reverse=reverse), rtol=1e-12, atol=1e-12)
        expected = a.flip(1).cumprod(1).flip(1) if reverse else a.cumprod(1)
        torch.testing.assert_close(product, expected, rtol=1e-12, atol=1e-300)


@pytest.mark.parametrize("method", METHODS)
def test_dense_transitions(method):
    """h_t = A_t h_{t-1} + b_t with full matrices, against the loop; and with diagonal ones against the linear scan."""
    a, b = torch.randn(2, 19, 4, 4, dtype=torch.float64) * 0.4, torch.randn(2, 19, 4, dtype=torch.float64)
    products, states = associative_scan(matrix_recurrence, (a, b), method=method)
    h, product = torch.zeros(2, 4, dtype=torch.float64), torch.eye(4, dtype=torch.float64).expand(2, 4, 4)
    for t in range(19):
        h, product = torch.einsum("bij,bj->bi", a[:, t], h) + b[:, t], a[:, t] @ product
        torch.testing.assert_close(states[:, t], h, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(products[:, t], product, rtol=1e-12, atol=1e-13)
    diagonal = a.diagonal(dim1=-2, dim2=-1)
    _, h = associative_scan(matrix_recurrence, (diagonal.diag_embed(), b), method=method)
    torch.testing.assert_close(h, linear_scan(diagonal, b), rtol=1e-12, atol=1e-12)


def test_the_operators_are_associative(gates):
    for operator, draw in (
        (linear_recurrence, lambda: (gates(2, 3, 4), gates(2, 3, 4))),
        (matrix_recurrence, lambda: (gates(2, 3, 4, 4), gates(2, 3, 4))),
    ):
        x, y, z = draw(), draw(), draw()
        torch.testing.assert_close(operator(operator(x, y), z), operator(x, operator(y, z)), rtol=1e-13, atol=1e-14)
        assert not torch.allclose(operator(x, y)[1], operator(y, x)[1])


@settings(max_examples=40, deadline=None)
@given(length=st.integers(1, 200), batch=st.integers(1, 3), reverse=st.booleans(), method=st.sampled_from(METHODS))
def test_running_sums_of_integers(length, batch, reverse, method):
    x = torch.randint(-100, 100, (batch, length, 2))
    expected = x.flip(1).cumsum(1).flip(1) if reverse else x.cumsum(1)
    assert torch.equal(associative_scan(torch.add, x, method=method, reverse=reverse), expected)


def _calls_and_work(method, length):
    calls = []

    def add(x, y):
        calls.append(x.shape[1])
        assert x.shape == y.shape
        return x + y

    associative_scan(add, torch.ones(1, length), method=method)
    return len(calls), sum(calls)


def test_depth_and_work_are_the_textbooks():
    """Calls in a row and elements combined, for L = 1024: the reason for having three methods."""
    length, logarithm = 1024, 10
    assert _calls_and_work("sequential", length) == (length - 1, length - 1)
    assert _calls_and_work("hillis_steele", length) == (logarithm, sum(length - 2**i for i in range(logarithm)))
    depth, work = _calls_and_work("blelloch", length)
    assert depth <= 2 * logarithm + 1
    assert work < 3 * length


@pytest.mark.parametrize("method", METHODS)
def test_nothing_to_scan(method):
    leaves = (torch.ones(2, 0, 3), torch.ones(2, 0))
    a, b = associative_scan(lambda x, y: x, leaves, method=method)
    assert (a.shape, b.shape) == ((2, 0, 3), (2, 0))
    assert associative_scan(torch.add, torch.ones(0, 5, 3), method=method).shape == (0, 5, 3)
    single = torch.randn(2, 1, 3)
    assert torch.equal(associative_scan(torch.add, single, method=method), single)


@pytest.mark.parametrize(
    ("leaves", "options", "kind", "message"),
    [
        (torch.ones(2, 3), {"method": "fast"}, ValueError, "method is 'fast'; expected one of blelloch, hillis"),
        ((), {}, ValueError, "leaves is a pytree of shapes"),
        ((torch.ones(2, 3), 1.0), {}, TypeError, "a leaf is a float"),
        ((torch.ones(2, 3), torch.ones(2, 4)), {}, ValueError, r"leaves is a pytree of shapes \[\(2, 3\), \(2, 4\)\]"),
        (torch.ones(3), {}, ValueError, "leaves is a pytree of shapes"),
    ],
)
def test_bad_input(leaves, options, kind, message):
    with pytest.raises(kind, match=message):
        associative_scan(torch.add, leaves, **options)


def test_the_example_of_the_notes_is_the_doctest():
    function = inspect.unwrap(associative_scan)
    assert "[[3, 1, 7, 0, 4, 1, 6, 3]]" in function.__doc__
    assert "[[ 3,  4, 11, 11, 15, 16, 22, 25]]" in function.__doc__
    runner = doctest.DocTestRunner()
    for test in doctest.DocTestFinder().find(function, "associative_scan", globs=dict(vars(associative))):
        runner.run(test)
    assert runner.summarize().failed == 0
    assert runner.tries > 0
    for method in METHODS:
        x = torch.tensor([[3, 1, 7, 0, 4, 1, 6, 3]])
        assert associative_scan(torch.add, x, method=method).tolist() == [[3, 4, 11, 11, 15, 16, 22, 25]]
