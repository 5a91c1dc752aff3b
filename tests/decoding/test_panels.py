"""Where weights lie: panels and groups, read back number by number."""

import struct

import pytest
import torch

from recurra.decoding.linear import (
    GROUP,
    GROUP_BYTES,
    PANEL,
    QUAD,
    _from_int4,
    _from_panels,
    _from_quads,
    _to_int4,
    _to_panels,
    _to_quads,
)

SIZES = [(1, 1), (3, 64), (65, 33), (0, 5), (5, 0)]


@pytest.mark.parametrize(("n_out", "n_in"), SIZES)
def test_panels(n_out, n_in):
    rows = torch.randint(-127, 128, (n_out, n_in), dtype=torch.int8)
    panels = _to_panels(rows)
    assert panels.shape == (-(-n_out // PANEL), n_in, PANEL)
    assert all(panels[o // PANEL, i, o % PANEL] == rows[o, i] for o in range(n_out) for i in range(n_in))
    assert panels.sum(dtype=torch.int64) == rows.sum(dtype=torch.int64)  # the rest is zeros
    assert torch.equal(_from_panels(panels, n_out), rows)


@pytest.mark.parametrize(("n_out", "n_in"), SIZES)
def test_quads(n_out, n_in):
    rows = torch.randint(-127, 128, (n_out, n_in), dtype=torch.int8)
    quads = _to_quads(rows)
    assert quads.shape == (-(-n_out // PANEL), -(-n_in // QUAD), PANEL, QUAD)
    places = [(o, i, (o // PANEL, i // QUAD, o % PANEL, i % QUAD)) for o in range(n_out) for i in range(n_in)]
    assert all(quads[place] == rows[o, i] for o, i, place in places)
    assert quads.sum(dtype=torch.int64) == rows.sum(dtype=torch.int64)  # the rest is zeros
    assert torch.equal(_from_quads(quads, n_out, n_in), rows)


@pytest.mark.parametrize(("n_out", "n_in"), SIZES)
def test_int4_read_byte_by_byte(n_out, n_in):
    weight = torch.randn(n_out, n_in)
    stored = _to_int4(weight)
    assert stored.shape == (-(-n_out // PANEL), -(-n_in // GROUP), GROUP_BYTES)
    kept = _from_int4(stored, n_out, n_in)
    assert kept.shape == weight.shape
    for o in range(0, n_out, 7):
        for i in range(n_in):
            group, lane = bytes(stored[o // PANEL, i // GROUP].tolist()), o % PANEL
            (scale,), (minimum,) = (struct.unpack_from("<e", group, 2 * (lane + PANEL * part)) for part in (0, 1))
            shift = 8 * (i % 4) + 4 * (i % 8 // 4)
            (word,) = struct.unpack_from("<I", group, 4 * PANEL + 4 * (PANEL * (i % GROUP // 8) + lane))
            assert kept[o, i] == torch.tensor(minimum) + torch.tensor(scale) * (word >> shift & 15)
