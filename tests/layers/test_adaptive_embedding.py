"""The adaptive embedding against one token at a time."""

import pytest
import torch

from recurra.layers.embeddings import AdaptiveEmbedding

SHAPES = [
    {},
    {"d_embedding": 10},
    {"cutoffs": (3, 7, 11)},
    {"cutoffs": (3, 7, 11), "d_embedding": 10},
    {"cutoffs": (3, 7, 11), "div_val": 2},
    {"cutoffs": (3,), "div_val": 3, "d_embedding": 10},
    {"div_val": 2},
]
VOCABULARY, D_MODEL = 13, 8


def one_token(embedding, token):
    """sqrt(d_model) P_i E_i[token - first id], by hand."""
    edges = [0, *embedding.clusters.cutoffs, VOCABULARY]
    cluster = sum(token >= cutoff for cutoff in edges[1:-1])
    if len(embedding.tables) == 1:
        cluster, edges = 0, [0]
    vector = embedding.tables[cluster][token - edges[cluster]]
    if len(embedding.projections):
        vector = torch.stack([(row * vector).sum() for row in embedding.projections[cluster]])
    return vector * D_MODEL**0.5


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_token(shape):
    embedding = AdaptiveEmbedding(VOCABULARY, D_MODEL, **shape).double()
    tokens = torch.randperm(VOCABULARY).view(1, -1)
    expected = torch.stack([one_token(embedding, int(token)) for token in tokens[0]])[None]
    torch.testing.assert_close(embedding(tokens), expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gradients_reach_exactly_the_tokens_that_stand_there(shape):
    embedding = AdaptiveEmbedding(VOCABULARY, D_MODEL, **shape).double()
    tokens = torch.tensor([[12, 4, 4], [0, 12, 8]])
    embedding(tokens).square().sum().backward()
    found = torch.cat([table.grad.abs().sum(1) for table in embedding.tables]).nonzero().flatten()
    assert found.tolist() == [0, 4, 8, 12]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("wrong", [-1, VOCABULARY])
def test_ids_outside_the_vocabulary_are_refused(shape, wrong, monkeypatch):
    embedding = AdaptiveEmbedding(VOCABULARY, D_MODEL, **shape)
    tokens = torch.tensor([[0, wrong]])
    with pytest.raises(IndexError, match=f"tokens is a tensor with the id {wrong}"):
        embedding(tokens)
    # without the check, as on a GPU, the look-up itself must fail: a wrong id never gets another word's vector
    monkeypatch.setattr("recurra.layers.embeddings.require_tokens", lambda *arguments: None)
    with pytest.raises(IndexError):
        embedding(tokens)
