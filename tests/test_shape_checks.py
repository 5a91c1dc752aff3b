"""The checker that the tests run under: wrong shapes are refused on the way in and on the way out."""

import os

import pytest
import torch
from jaxtyping import Float, TypeCheckError, jaxtyped
from tests.shape_checks import check
from torch import Tensor

import recurra


@jaxtyped(typechecker=check)
def first_steps(x: Float[Tensor, "B L"], y: Float[Tensor, "B L"], n: int) -> Float[Tensor, "B L"]:
    return (x + y)[:, :n]


def test_shapes_that_fit_pass():
    assert first_steps(torch.zeros(2, 5), torch.zeros(2, 5), n=5).shape == (2, 5)


def test_arguments_are_checked_by_themselves_and_against_each_other():
    with pytest.raises(TypeCheckError, match=r"the parameters of .*first_steps"):
        first_steps(torch.zeros(5), torch.zeros(5), n=5)
    with pytest.raises(TypeCheckError, match=r"the parameters of .*first_steps"):
        first_steps(torch.zeros(2, 5), torch.zeros(2, 1), n=5)


def test_what_is_returned_is_checked_against_the_arguments():
    with pytest.raises(TypeCheckError, match=r"the return value of .*first_steps"):
        first_steps(torch.zeros(2, 5), torch.zeros(2, 5), n=4)


@pytest.mark.skipif(os.environ.get("RECURRA_SHAPE_CHECKS") == "0", reason="the shape checks are switched off")
def test_the_functions_of_the_package_are_checked():
    with pytest.raises(TypeCheckError, match="the parameters of recurra"):
        recurra.create_mixer("gru", 4)(torch.zeros(2, 3, dtype=torch.int64))
