"""Images as sequences of patches."""

import torch

from recurra.video.timesformer import _PatchEmbedding


def test_every_patch_is_projected_row_by_row_from_the_top_left():
    layer, images = _PatchEmbedding(2, 3, 5).double(), torch.randn(2, 2, 6, 9, dtype=torch.float64)
    found = layer(images)
    assert found.shape == (2, 2 * 3, 5)
    weight, bias = layer.projection.weight.flatten(1), layer.projection.bias
    for row in range(2):
        for column in range(3):
            patch = images[:, :, 3 * row : 3 * row + 3, 3 * column : 3 * column + 3].flatten(1)
            torch.testing.assert_close(found[:, 3 * row + column], patch @ weight.T + bias, rtol=1e-12, atol=1e-12)
