"""Clusters and token ids, and what is refused."""

import pytest
import torch

from recurra.layers.embeddings import Clusters, require_tokens


def test_bounds_sizes_and_channels():
    clusters = Clusters(30, 16, (8, 14, 22), 2)
    assert clusters.bounds == [(0, 8), (8, 14), (14, 22), (22, 30)]
    assert clusters.sizes == [8, 6, 8, 8]
    assert [clusters.n_channels(i) for i in range(4)] == [16, 8, 4, 2]
    assert [tuple(table.shape) for table in clusters.tables()] == [(8, 16), (6, 8), (8, 4), (8, 2)]


def test_one_table_for_all_clusters_of_the_same_width():
    clusters = Clusters(30, 16, (8, 14, 22), 1)
    assert [tuple(table.shape) for table in clusters.tables()] == [(30, 16)]
    assert len(clusters.projections(16, 4)) == 0
    assert [tuple(matrix.shape) for matrix in clusters.projections(12, 4)] == [(12, 16)] * 4


@pytest.mark.parametrize("cutoffs", [(0,), (5, 5), (7, 3), (30,), (10, 40), (-1, 4)])
def test_cutoffs_out_of_order_or_past_the_vocabulary_are_refused(cutoffs):
    with pytest.raises(ValueError, match=rf"cutoffs is \[{cutoffs[0]}.*expected increasing numbers from 1 to 29"):
        Clusters(30, 16, cutoffs)


def test_a_cluster_without_channels_is_refused():
    assert Clusters(30, 16, (8, 14), 4).n_channels(2) == 1
    with pytest.raises(ValueError, match=r"div_val is 4; expected a number that leaves each cluster channels"):
        Clusters(30, 15, (8, 14), 4)


@pytest.mark.parametrize("wrong", [-1, 7, 100])
def test_a_token_outside_the_vocabulary_is_named(wrong):
    tokens = torch.tensor([[0, 6], [wrong, 3]])
    require_tokens("tokens", tokens[:1], 7)
    with pytest.raises(IndexError, match=f"tokens is a tensor with the id {wrong}; expected ids from 0 to 6"):
        require_tokens("tokens", tokens, 7)
