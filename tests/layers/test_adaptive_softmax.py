"""The adaptive softmax against the probability of one word at a time."""

import math

import pytest
import torch
from tests.gradients import require_same_gradients
from tests.layers.test_adaptive_embedding import D_MODEL, SHAPES, VOCABULARY
from torch.utils._python_dispatch import TorchDispatchMode

from recurra.layers.embeddings import AdaptiveEmbedding
from recurra.layers.softmax import AdaptiveSoftmax


@pytest.fixture(params=SHAPES, ids=str)
def softmax(request) -> AdaptiveSoftmax:
    return random_weights(AdaptiveSoftmax(VOCABULARY, D_MODEL, **request.param)).double()


def random_weights(module):
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()
    return module


def probability(softmax, h, token):
    """p(token | h): one word, one score at a time."""
    cutoffs = list(softmax.clusters.cutoffs)
    edges = [0, *cutoffs, VOCABULARY]

    def score(cluster, token):
        single = len(softmax.tables) == 1
        table, row = (0, token) if single else (cluster, token - edges[cluster])
        projected = h @ softmax.projections[cluster] if len(softmax.projections) else h
        return (projected @ softmax.tables[table][row] + softmax.biases[table][row]).item()

    def share(one, scores):
        return math.exp(one) / sum(math.exp(other) for other in scores)

    head = [score(0, word) for word in range(edges[1])]
    if cutoffs:
        projected = h @ softmax.projections[0] if len(softmax.projections) else h
        head += [(projected @ w + b).item() for w, b in zip(softmax.cluster_weight, softmax.cluster_bias)]
    cluster = sum(token >= cutoff for cutoff in cutoffs)
    if cluster == 0:
        return share(head[token], head)
    tail = [score(cluster, word) for word in range(edges[cluster], edges[cluster + 1])]
    return share(head[edges[1] + cluster - 1], head) * share(score(cluster, token), tail)


def test_log_probabilities_of_every_word(softmax):
    hidden = torch.randn(3, D_MODEL, dtype=torch.float64)
    expected = [[math.log(probability(softmax, h, word)) for word in range(VOCABULARY)] for h in hidden]
    actual = softmax.log_probabilities(hidden)
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float64), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(actual.exp().sum(-1), torch.ones(3, dtype=torch.float64), rtol=1e-12, atol=0)


def test_loss_and_its_gradients_are_those_of_the_full_softmax(softmax):
    hidden = torch.randn(40, D_MODEL, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(VOCABULARY, (40,))
    loss = softmax.loss(hidden, targets)
    full = -softmax.log_probabilities(hidden)[torch.arange(40), targets]
    require_same_gradients(loss, full, [hidden, *softmax.parameters()], 1e-12)


def test_ignored_targets_give_nothing(softmax):
    hidden = torch.randn(5, D_MODEL, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([1, -100, 12, -100, 6])
    loss = softmax.loss(hidden, targets)
    counted = targets >= 0
    torch.testing.assert_close(loss[counted], softmax.loss(hidden[counted], targets[counted]))
    assert loss[~counted].tolist() == [0.0, 0.0]
    (gradient,) = torch.autograd.grad(loss.sum(), hidden)
    assert not gradient[~counted].any()
    assert gradient[counted].any(1).all()


@pytest.mark.parametrize("wrong", [-1, -101, VOCABULARY])
def test_targets_outside_the_vocabulary_are_refused(softmax, wrong):
    with pytest.raises(IndexError, match=f"targets is a tensor with the id {wrong}"):
        softmax.loss(torch.randn(2, D_MODEL, dtype=torch.float64), torch.tensor([0, wrong]))


class Widths(TorchDispatchMode):
    """Records the shapes of all results."""

    def __init__(self):
        super().__init__()
        self.shapes = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.shapes.add(tuple(result.shape))
        return result


def test_the_loss_never_forms_the_full_softmax():
    softmax = AdaptiveSoftmax(1000, D_MODEL, cutoffs=(50, 300))
    targets = torch.tensor([3] * 20 + [60] * 4 + [900] * 2)
    with Widths() as seen:
        softmax.loss(torch.randn(26, D_MODEL), targets)
    matrices = {shape for shape in seen.shapes if len(shape) == 2 and shape[1] > D_MODEL}
    # apart from weights and their transposes: 26 positions by the head, 4 and 2 by their clusters
    assert {(26, 52), (4, 250), (2, 700)} == {shape for shape in matrices if shape[0] != D_MODEL}


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if "cutoffs" in shape], ids=str)
def test_ties_share_parameters(shape):
    embedding = AdaptiveEmbedding(VOCABULARY, D_MODEL, **shape)
    softmax = AdaptiveSoftmax(VOCABULARY, D_MODEL, **shape)
    which = [False] + [True] * len(shape["cutoffs"])
    softmax.tie_tables(embedding)
    softmax.tie_projections(embedding, which)
    assert all(one is other for one, other in zip(softmax.tables, embedding.tables))
    for cluster, projection in enumerate(softmax.projections):
        theirs = embedding.projections[cluster if len(embedding.tables) > 1 else 0]
        assert (projection is theirs) == which[cluster]


def test_losses_are_float32_under_autocast():
    softmax = random_weights(AdaptiveSoftmax(VOCABULARY, D_MODEL, cutoffs=(3, 7), div_val=2))
    hidden, targets = torch.randn(6, D_MODEL), torch.randint(VOCABULARY, (6,))
    with torch.autocast("cpu", torch.bfloat16):
        loss, log_probabilities = softmax.loss(hidden, targets), softmax.log_probabilities(hidden)
    assert (loss.dtype, log_probabilities.dtype) == (torch.float32, torch.float32)
    torch.testing.assert_close(loss, softmax.loss(hidden, targets), rtol=0.05, atol=0.05)
