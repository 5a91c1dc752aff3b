"""The checker that the tests run under: wrong shapes are refused on the way in and on the way out."""

import os

import pytest
import torch
from jaxtyping import Float, TypeCheckError, jaxtyped
from tests import shape_checks
from torch import Tensor

import recurra


def unchecked_steps(x: Float[Tensor, "B L"], y: Float[Tensor, "B L"], n: int) -> Float[Tensor, "B L"]:
    return (x + y)[:, :n]


first_steps = jaxtyped(unchecked_steps, typechecker=shape_checks.check)


def test_shapes_that_fit_pass():
    assert first_steps(torch.zeros(2, 5), torch.zeros(2, 5), n=5).shape == (2, 5)


def test_arguments_are_checked_by_themselves_and_against_each_other():
    with pytest.raises(TypeCheckError, match=r"the parameters of .*unchecked_steps"):
        first_steps(torch.zeros(5), torch.zeros(5), n=5)
    with pytest.raises(TypeCheckError, match=r"the parameters of .*unchecked_steps"):
        first_steps(torch.zeros(2, 5), torch.zeros(2, 1), n=5)


def test_what_is_returned_is_checked_against_the_arguments():
    with pytest.raises(TypeCheckError, match=r"the return value of .*unchecked_steps"):
        first_steps(torch.zeros(2, 5), torch.zeros(2, 5), n=4)


def test_the_first_calls_of_each_test_are_checked():
    repeated = shape_checks.first_calls_checked(jaxtyped, unchecked_steps, typechecker=shape_checks.check)
    wrong = torch.zeros(2, 5), torch.zeros(2, 1)
    for _ in range(2):
        for _ in range(shape_checks.MOST_CALLS):
            with pytest.raises(TypeCheckError):
                repeated(*wrong, n=5)
        assert repeated(*wrong, n=5).shape == (2, 5)
        shape_checks.begin_test()


@pytest.mark.skipif(os.environ.get("RECURRA_SHAPE_CHECKS") == "0", reason="the shape checks are switched off")
def test_the_functions_of_the_package_are_checked():
    with pytest.raises(TypeCheckError, match="the parameters of recurra"):
        recurra.create_mixer("gru", 4)(torch.zeros(2, 3, dtype=torch.int64))
