"""Reformer against the paper's rounds, combined as in its appendix A, and against the layer of transformers."""

import pytest
import torch
from tests.gradients import require_same_gradients

from recurra.mixers.reformer import Reformer

D_MODEL = 8


def bucket(rotations: torch.Tensor, query: torch.Tensor) -> int:
    """argmax([R q; -R q]), for rotations (d_head, n_buckets / 2)."""
    rotated = (query @ rotations).tolist()
    numbers = [*rotated, *(-number for number in rotated)]
    return max(range(len(numbers)), key=numbers.__getitem__)


def by_rounds(layer: Reformer, x: torch.Tensor) -> torch.Tensor:
    """o_i = sum_r exp(z_i^r - z_i) o_i^r with m_ij = log N_ij, and 10^5 for j = i: one number at a time."""
    n_heads, n_rounds = layer.n_heads, layer.rotations.shape[2]
    q = (x @ layer.queries.weight.T).unflatten(-1, (n_heads, -1))
    v = (x @ layer.values.weight.T).unflatten(-1, (n_heads, -1))
    buckets = [
        [[bucket(layer.rotations[h, :, r], q[i, h].detach()) for r in range(n_rounds)] for h in range(n_heads)]
        for i in range(len(x))
    ]
    outputs = []
    for i in range(len(x)):
        heads = []
        for h in range(n_heads):
            sums, means = [], []
            for r in range(n_rounds):
                scores, values = [], []
                for j in range(max(0, i - layer.window + 1), i + 1):
                    n_shared = sum(one == other for one, other in zip(buckets[i][h], buckets[j][h]))
                    if buckets[i][h][r] == buckets[j][h][r]:
                        penalty = 1e5 if i == j else torch.tensor(float(n_shared)).double().log()
                        length = (
                            q[j, h].square().sum() + 1e-6 * q.shape[-1]
                        ).sqrt()  # the authors' code adds 1e-6 to the mean
                        scores.append(q[i, h] @ q[j, h] / length - penalty)
                        values.append(v[j, h])
                scores = torch.stack(scores)
                sums.append(scores.logsumexp(0))
                means.append((scores.softmax(0)[:, None] * torch.stack(values)).sum(0))
            z = torch.stack(sums)
            heads.append((torch.exp(z - z.logsumexp(0))[:, None] * torch.stack(means)).sum(0))
        outputs.append(torch.cat(heads))
    return torch.stack(outputs) @ layer.output_projection.weight.T


@pytest.mark.parametrize(
    "options", [{"n_rounds": 1}, {"n_rounds": 3, "n_buckets": 4}, {"window": 1}, {"window": 30, "n_heads": 1}], ids=str
)
def test_outputs_and_gradients_are_the_papers(options):
    layer = Reformer(D_MODEL, **{"n_heads": 2, "window": 5, **options}).double()
    x = torch.randn(1, 13, D_MODEL, dtype=torch.float64, requires_grad=True)
    require_same_gradients(layer(x)[0][0], by_rounds(layer, x[0]), [x, *layer.parameters()], 1e-11)


def test_in_one_bucket_it_is_the_published_layer_whose_chunks_hide_nothing():
    """Two chunks, each of which sees the other: transformers' layer, which looks at no bucket within them."""
    reformer = pytest.importorskip("transformers.models.reformer.modeling_reformer")
    from transformers import ReformerConfig

    sizes = {"hidden_size": D_MODEL, "num_attention_heads": 2, "attention_head_size": D_MODEL // 2}
    config = ReformerConfig(
        **sizes,
        attn_layers=["lsh"],
        num_buckets=4,
        num_hashes=1,
        lsh_attn_chunk_length=8,
        lsh_num_chunks_before=1,
        lsh_num_chunks_after=0,
        is_decoder=True,
        lsh_attention_probs_dropout_prob=0.0,
    )
    published = reformer.LSHSelfAttention(config).eval()
    layer = Reformer(D_MODEL, n_heads=2, window=16, n_buckets=4, n_rounds=1)
    layer.output_projection = torch.nn.Identity()
    layer.queries, layer.values = published.query_key, published.value
    layer.rotations.zero_()
    x = torch.randn(3, 16, D_MODEL)
    with torch.no_grad():
        torch.testing.assert_close(layer(x)[0], published(x).hidden_states, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_a_step_alone_in_its_buckets_sees_itself_and_others_do_not(dtype):
    layer = Reformer(2, n_heads=1, window=4, n_buckets=2, n_rounds=1).to(dtype)
    with torch.no_grad():
        for projection in (layer.queries, layer.values, layer.output_projection):
            projection.weight.copy_(torch.eye(2))
        layer.rotations.copy_(torch.tensor([1.0, 0.0]).view(1, 2, 1, 1))  # the sign of the first channel
        x = torch.tensor([[[1.0, 5.0], [-1.0, 7.0], [2.0, 3.0], [-3.0, 1.0]]]).to(dtype)
        torch.testing.assert_close(layer(x)[0], x[:, [0, 1, 0, 1]])
