import math
from dataclasses import dataclass
from typing import Literal

import pytest
import torch

from recurra import delta_rule, gate_loop, linear_scan
from recurra.checks import (
    choose,
    fields_of,
    kind_of,
    require_at_least,
    require_heads,
    require_layout,
    require_literal,
    require_literal_fields,
    require_positive,
    require_probability,
    require_share,
    require_tensor,
    require_whole_number,
    sentence,
)

CPU = torch.device("cpu")


@dataclass
class Config:
    epochs: int = 3
    max_steps: int | None = None
    precision: Literal["high", "low"] = "high"


@pytest.mark.parametrize("value", ["0.1", None, [0.1], (1,), {}, {1}, 1j, torch.ones(2)], ids=str)
@pytest.mark.parametrize(
    "check", [require_positive, require_probability, require_share, lambda **x: require_at_least(1, **x)]
)
def test_what_is_no_number_is_refused_by_its_name(check, value):
    with pytest.raises(TypeError, match=r"^rate is .*; expected a number$"):
        check(rate=value)


def test_the_sentence():
    assert sentence("x", "3", "at most 2") == "x is 3; expected at most 2"
    assert sentence("x", "3", "at most 2", "omit it") == "x is 3; expected at most 2: omit it"


def test_fields_have_the_names_of_a_recipe_and_those_that_are_not_set_are_omitted():
    assert fields_of(Config(), "training", "epochs", "max_steps") == {"training.epochs": 3}
    assert fields_of(Config(max_steps=0), "training", "max_steps") == {"training.max_steps": 0}


@pytest.mark.parametrize(
    ("check", "good", "bad", "message"),
    [
        (lambda **v: require_at_least(2, **v), [2, 2.5], [1, math.nan], "at least 2"),
        (lambda **v: require_whole_number(2, **v), [2, 9], [1], "at least 2"),
        (require_probability, [0, 0.9], [-0.1, 1, math.nan], r"a probability in \[0, 1\)"),
        (require_share, [0.1, 1], [0, 1.1, math.nan], r"a share in \(0, 1\]"),
        (require_positive, [1e-9, 3], [0, -1, math.inf, math.nan], "a finite number above 0"),
        (lambda **v: require_literal(Literal["a", "b"], **v), ["a", "b"], ["c", None], "one of a, b"),
    ],
)
def test_values_are_refused_by_name(check, good, bad, message):
    for value in good:
        check(first=value, second=value)
    for value in bad:
        with pytest.raises(ValueError, match=rf"^second is {value!r}; expected {message}$"):
            check(first=good[0], second=value)


@pytest.mark.parametrize(("value", "kind"), [(2.0, "a float"), (True, "a bool"), ("2", "a str"), (None, "None")])
def test_whole_numbers_are_integers(value, kind):
    with pytest.raises(TypeError, match=rf"^n is {value!r}, {kind}; expected a whole number$"):
        require_whole_number(0, n=value)


def test_choices_are_looked_up():
    assert choose("mode", {"fast": 1, "slow": 2}, "slow") == 2
    with pytest.raises(ValueError, match=r"^mode is 'odd'; expected one of fast, slow$"):
        choose("mode", {"fast": 1, "slow": 2}, "odd")


def test_fields_with_literals_are_checked():
    require_literal_fields(Config(), "training")
    config = Config()
    config.precision = "middle"
    with pytest.raises(ValueError, match=r"^training\.precision is 'middle'; expected one of high, low$"):
        require_literal_fields(config, "training")


def test_heads_divide_the_channels():
    require_heads(4, d_model=8, d_v=4)
    with pytest.raises(ValueError, match=r"^n_heads is 3; expected a divisor of d_model = 8$"):
        require_heads(3, d_v=6, d_model=8)
    with pytest.raises(ValueError, match=r"^n_heads is 0; expected at least 1$"):
        require_heads(0, d_model=8)


def test_tensors_are_described_by_type_shape_and_device():
    assert kind_of(torch.zeros(2, 3)) == "float32 (2, 3) on cpu"
    assert [kind_of(value) for value in (None, [], 1)] == ["None", "a list", "an int"]
    with pytest.raises(TypeError, match=r"^x is a list; expected a torch\.Tensor$"):
        require_tensor("x", [1.0])


@pytest.mark.parametrize("other", [torch.zeros(3, 2), torch.zeros(2, 3, dtype=torch.float64), torch.zeros(2)])
def test_another_layout_is_refused(other):
    require_layout("x", torch.zeros(2, 3), (2, 3), torch.float32, CPU)
    with pytest.raises(ValueError, match=r"^x is .*; expected float32 \(2, 3\) on cpu: call y$"):
        require_layout("x", other, (2, 3), torch.float32, CPU, hint="call y")


def test_a_long_value_is_cut():
    message = sentence("experiment", repr("x" * 70_000), "one of text, text-crt")
    assert len(message) < 1000
    assert message.startswith("experiment is 'xxx")
    assert message.endswith("xxx...; expected one of text, text-crt")


@pytest.mark.filterwarnings("ignore:.*prototype:UserWarning", "ignore:Sparse CSR:UserWarning")
@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (torch.Tensor.to_sparse, "sparse_coo"),
        (lambda x: x.flatten(1).to_sparse_csr(), "sparse_csr"),
        (lambda x: torch.nested.nested_tensor(list(x)), "nested"),
    ],
)
def test_operators_refuse_sparse_and_nested_tensors(unchecked, make, kind):
    x, step = torch.rand(2, 5, 2, 4), torch.rand(2, 5, 2, 1)
    refused = rf"is a {kind} tensor; expected a dense tensor: use \w+\.to_dense\(\)"
    for operator, arguments in (
        (linear_scan, [x, x]),
        (gate_loop, [x, x, x, step]),
        (delta_rule, [x, x, x, step, step]),
    ):
        for place, argument in enumerate(arguments):
            with pytest.raises(TypeError, match=refused):
                operator(*arguments[:place], make(argument), *arguments[place + 1 :])
