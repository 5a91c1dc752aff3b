"""The table of the Triton kernels' sizes: how it is looked up, and what is refused."""

import json
from dataclasses import replace

import pytest
import torch

from recurra.ops._toolkit import triton as triton_tiles
from recurra.ops._toolkit.triton import (
    TABLE,
    ChunkTiles,
    WalkTiles,
    look_up,
    read_table,
    tiles_for,
    with_entry,
)

OWN, OTHER = WalkTiles(channels=64, stages=2), WalkTiles(channels=32, stages=6)


@pytest.fixture
def table():
    one = with_entry({}, "Card A", "9.0", "fused", "bfloat16 complex", OWN)
    return with_entry(one, "Card B", "8.0", "fused", "bfloat16 complex", OTHER)


@pytest.fixture
def written(tmp_path):
    def write(devices, format_=1):
        path = tmp_path / "tiles.json"
        path.write_text(json.dumps({"format": format_, "devices": devices}))
        return path

    return write


@pytest.mark.parametrize(
    ("device", "capability", "kernel", "number", "is_complex", "expected"),
    [
        ("Card A", "9.0", "fused", torch.bfloat16, True, OWN),
        ("Card B", "8.0", "fused", torch.bfloat16, True, OTHER),
        ("Card C", "9.0", "fused", torch.bfloat16, True, OWN),  # as another of its generation
        ("Card C", "10.0", "fused", torch.bfloat16, True, WalkTiles(stages=3)),
        ("Card A", "9.0", "fused", torch.bfloat16, False, WalkTiles(stages=3)),
        ("Card A", "9.0", "fused", torch.float32, True, WalkTiles(stages=3)),
        ("Card A", "9.0", "scan", torch.bfloat16, True, WalkTiles()),
        ("Card A", "9.0", "chunk", torch.float32, True, ChunkTiles(tile=16, key_tile=16)),
    ],
)
def test_a_card_its_generation_then_the_defaults(table, device, capability, kernel, number, is_complex, expected):
    assert look_up(table, device, capability, kernel, number, is_complex) == expected


def test_a_table_is_read_as_it_was_written(table, written):
    assert read_table(written(table)) == table
    assert isinstance(read_table(TABLE), dict), "the package's own"


def test_an_entry_takes_the_place_of_the_old_one_alone(table):
    new = with_entry(table, "Card A", "9.0", "fused", "bfloat16 complex", OTHER)
    assert look_up(new, "Card A", "9.0", "fused", torch.bfloat16, True) == OTHER
    assert look_up(table, "Card A", "9.0", "fused", torch.bfloat16, True) == OWN
    more = with_entry(new, "Card A", "9.0", "chunk", "float32", ChunkTiles(span=128))
    assert more["Card A"]["fused"] == new["Card A"]["fused"]
    assert more["Card B"] == table["Card B"]
    beside = with_entry(table, "Card A", "9.0", "fused", "float32", OTHER)
    assert set(beside["Card A"]["fused"]) == {"bfloat16 complex", "float32"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"channels": 48}, "channels is 48; expected"),
        ({"stages": 0}, "stages is 0; expected 1 to 8"),
    ],
)
def test_sizes_that_no_kernel_takes_are_refused(table, written, change, message):
    table["Card A"]["fused"]["bfloat16 complex"].update(change)
    with pytest.raises(ValueError, match=message):
        read_table(written(table))


def test_chunks_hold_whole_blocks():
    with pytest.raises(ValueError, match=r"span is 16; expected at least block, 32"):
        ChunkTiles(span=16, block=32)


def test_other_formats_are_refused(table, written):
    with pytest.raises(ValueError, match=r"the format of .* is 2; expected 1"):
        read_table(written(table, format_=2))


def test_a_card_reads_the_file_that_the_environment_names(table, written, monkeypatch, tmp_path):
    class Properties:
        name, major, minor = "Card C", 9, 0

    monkeypatch.setattr("torch.cuda.get_device_properties", lambda index: Properties)
    monkeypatch.setenv("RECURRA_TILES", str(written(table)))
    triton_tiles.forget()
    call = "fused", torch.bfloat16, True, torch.device("cuda", 0)
    assert tiles_for(*call) == OWN
    written(with_entry(table, "Card C", "9.0", "fused", "bfloat16 complex", OTHER))
    assert tiles_for(*call) == OWN, "the file is read once"
    triton_tiles.forget()
    assert tiles_for(*call) == OTHER
    monkeypatch.setattr(triton_tiles, "TABLE", written(table).rename(tmp_path / "package.json"))
    written(with_entry({}, "Card C", "9.0", "chunk", "float32", ChunkTiles(span=128)))
    triton_tiles.forget()
    assert tiles_for(*call) == OWN, "what the file leaves open, the package says"
    triton_tiles.forget()


def test_sizes_are_tried_for_one_kernel_and_a_while(table):
    call = torch.float32, False, torch.device("cpu")
    with pytest.raises(ZeroDivisionError), triton_tiles.trying("scan", OWN):  # noqa: PT012
        assert tiles_for("scan", *call) == OWN
        assert tiles_for("fused", *call) == WalkTiles(stages=3)
        with triton_tiles.trying("scan", OTHER):
            assert tiles_for("scan", *call) == OTHER
        assert tiles_for("scan", *call) == OWN
        raise ZeroDivisionError
    assert tiles_for("scan", *call) == WalkTiles()


def test_plans_follow_the_sizes():
    tools = pytest.importorskip("recurra.ops._toolkit.triton", reason="Triton is not installed here")
    tiles = WalkTiles(channels=64, channels_per_warp=32, lanes=4096, shortest_chunk=16, stages=5)
    laid_out = tools.plan(1, 4096, 128, torch.device("cpu"), tiles)
    assert laid_out == (128, 32, 64, 2, 5)
    assert laid_out.options == {"BLOCK": 64, "STAGES": 5, "num_warps": 2}
    assert tools.plan(1, 4096, 128, torch.device("cpu"), replace(tiles, lanes=1024)).chunks == 8
    assert tools.plan(1, 64, 16, torch.device("cpu"), tiles) == (16, 4, 16, 1, 5)
