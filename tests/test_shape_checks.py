"""The checker that the tests run under: wrong shapes are refused on the way in and on the way out."""

import os

import pytest
import torch
from jaxtyping import Float, TypeCheckError, jaxtyped
from tests import shape_checks
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import recurra


def unchecked_steps(x: Float[Tensor, "B L"], y: Float[Tensor, "B L"], n: int) -> Float[Tensor, "B L"]:
    return (x + y)[:, :n]


first_steps = jaxtyped(unchecked_steps, typechecker=shape_checks.check)


def test_arguments_and_results_are_checked_by_themselves_and_against_each_other():
    x = torch.zeros(2, 5)
    assert first_steps(x, x, n=5).shape == (2, 5)
    for wrong in [(x[0], x[0]), (x, x[:, :1])]:
        with pytest.raises(TypeCheckError, match=r"the parameters of .*unchecked_steps"):
            first_steps(*wrong, n=5)
    with pytest.raises(TypeCheckError, match=r"the return value of .*unchecked_steps"):
        first_steps(x, x, n=4)


class Cutting:
    """A function that returns what its signature says it returns until it is told to leave a row out."""

    wrong = False

    def __init__(self):
        def cut(x: Float[Tensor, "B L"], scale: float) -> Float[Tensor, "B L"]:
            return x[1:] * scale if self.wrong else x * scale

        self.cut = shape_checks.kinds_of_calls_checked(jaxtyped, cut, typechecker=shape_checks.check)


def test_calls_of_another_kind_are_checked_and_those_like_one_that_passed_are_not():
    case, x = Cutting(), torch.zeros(3, 5)
    case.cut(x, 1.0)
    case.wrong = True
    for _ in range(2):
        assert case.cut(torch.ones(3, 5), 1.0).shape == (2, 5)
        shape_checks.begin_test()
    for another in [(torch.zeros(4, 5), 1.0), (x.double(), 1.0), (x, 2.0), (x, 2.0), (x[0], 1.0)]:
        with pytest.raises(TypeCheckError):  # a call that was refused is checked again
            case.cut(*another)


def test_objects_with_other_settings_make_another_kind_of_call():
    kind = shape_checks._kind
    assert kind(torch.nn.Linear(2, 3)) == kind(torch.nn.Linear(2, 3))
    assert kind(torch.nn.Linear(2, 3)) != kind(torch.nn.Linear(2, 4))
    assert kind(torch.nn.Linear(2, 3)) != kind(torch.nn.Linear(2, 3).eval())
    assert kind((torch.zeros(2), None)) != kind((torch.zeros(3), None))
    assert kind([1]) != kind([True])
    assert len({kind(value) for value in (0, False, 0.0, None, "", (), [], torch.zeros(0), object())}) == 9


def test_symbolic_sizes_are_checked_too():
    case, x = Cutting(), torch.zeros(3, 5)
    with FakeTensorMode(shape_env=ShapeEnv(), static_shapes=False) as fake:
        symbolic = fake.from_tensor(x)
        assert type(symbolic.shape[0]) is torch.SymInt
        case.cut(symbolic, 1.0)
        case.wrong = True
        with pytest.raises(TypeCheckError):
            case.cut(symbolic, 2.0)


def test_so_many_calls_are_looked_at_in_a_test_and_no_more():
    case = Cutting()
    for size in range(shape_checks.MOST_CALLS):
        case.cut(torch.zeros(2, size), 1.0)
    case.wrong = True
    assert case.cut(torch.zeros(3, 5), 1.0).shape == (2, 5)


@pytest.mark.skipif(os.environ.get("RECURRA_SHAPE_CHECKS") == "0", reason="the shape checks are switched off")
def test_the_functions_of_the_package_are_checked():
    with pytest.raises(TypeCheckError, match="the parameters of recurra"):
        recurra.create_mixer("gru", 4)(torch.zeros(2, 3, dtype=torch.int64))
