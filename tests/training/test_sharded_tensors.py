"""How tensors are taken out of a payload: tied ones once, on every rank under the same name."""

import torch

from recurra.training.sharded_checkpoint import join_tensors, split_tensors


def test_tied_tensors_are_one_even_where_a_rank_has_no_rows_of_them():
    """FSDP gives a rank without rows of a parameter an empty view of memory that is padded."""
    memory, other = torch.zeros(4, 3), torch.zeros(4, 3)
    payload = {"model": {"first": memory[:0], "second": memory[:0], "third": other[:0]}, "list": [memory[1:], 5]}
    plain, tensors = split_tensors(payload)
    assert list(tensors) == ["model/first", "model/third", "list/0"]
    back = join_tensors(plain, tensors)
    assert back["model"]["second"] is back["model"]["first"] is tensors["model/first"]
    assert back["list"][1] == 5


def test_tensors_without_memory_are_apart():
    _, tensors = split_tensors({"model": {"first": torch.empty(0), "second": torch.empty(0)}})
    assert list(tensors) == ["model/first", "model/second"]
