"""Shared workspaces: what is in use at one time never meets, and everything else may."""

from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recurra.decoding._instructions import MAP, REPEAT, Instruction, Place, share_workspace


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_storages_in_use_at_one_time_lie_apart(data):
    sizes = data.draw(st.lists(st.integers(1, 300), min_size=1, max_size=12))
    tensors = [torch.empty(size, dtype=torch.uint8) for size in sizes]
    storages = [tensor.untyped_storage().data_ptr() for tensor in tensors]
    chosen = st.lists(st.integers(0, len(sizes) - 1), min_size=1, max_size=3)
    named = data.draw(st.lists(chosen, min_size=1, max_size=20))
    lasting = {storages[0]}
    instructions = [Instruction(MAP, 0, [Place(storages[i], sizes[i] // 2) for i in which], []) for which in named]
    moved, kept = share_workspace(instructions, tensors, lasting)
    shared = kept[-1]
    begin = {}
    for which, instruction in zip(named, moved, strict=True):
        for i, (storage, offset, _) in zip(which, instruction.places, strict=True):
            if i == 0:
                assert (storage, offset) == (storages[0], sizes[0] // 2)
                continue
            assert storage == shared.untyped_storage().data_ptr()
            assert begin.setdefault(i, offset - sizes[i] // 2) == offset - sizes[i] // 2
            assert 0 <= begin[i] <= len(shared) - sizes[i]
    uses = {i: [n for n, which in enumerate(named) if i in which] for i in begin}
    for i in begin:
        for j in begin:
            if i < j and uses[i][0] <= uses[j][-1] and uses[j][0] <= uses[i][-1]:
                assert begin[i] + sizes[i] <= begin[j] or begin[j] + sizes[j] <= begin[i]


def test_one_after_the_other_they_take_the_room_of_two():
    tensors = [torch.empty(1000, dtype=torch.uint8) for _ in range(20)]
    places = [Place(tensor.untyped_storage().data_ptr(), 0) for tensor in tensors]
    instructions = [Instruction(MAP, 0, [after, before], []) for before, after in pairwise(places)]
    _, kept = share_workspace(instructions, tensors, ())
    assert sum(tensor.nbytes for tensor in kept) == 2048


def test_what_is_repeated_shares_no_room():
    tensors = [torch.empty(1000, dtype=torch.uint8) for _ in range(6)]
    places = [Place(tensor.untyped_storage().data_ptr(), 0) for tensor in tensors]
    maps = [Instruction(MAP, 0, [after, before], []) for before, after in pairwise(places)]
    instructions = [maps[0], Instruction(REPEAT, 0, [], [3, 7]), *maps[1:]]
    moved, kept = share_workspace(instructions, tensors, ())
    offsets = [instruction.places[0].offset for instruction in moved[2:5]]
    assert len({*offsets, moved[2].places[1].offset}) == 4
    assert sum(tensor.nbytes for tensor in kept) == 4 * 1024
