"""Folders in the layout of state-spaces/mamba: against transformers' classes, and the authors' equations in a loop."""

import json

import pytest
import torch
from tests.convert.published.conftest import peer
from torch.nn import functional

from recurra.convert.published.folder import from_huggingface
from recurra.train.formats import _format_of

TOKENS = torch.randint(50, (1, 11), generator=torch.Generator().manual_seed(1))
CONFIG = {"d_model": 24, "n_layer": 2, "vocab_size": 50, "rms_norm": True, "residual_in_fp32": True}
CASES = {
    "mamba": {"ssm_cfg": {"d_state": 5, "d_conv": 3, "dt_rank": 3}, "fused_add_norm": True},
    "mamba2": {
        "ssm_cfg": {"layer": "Mamba2", "d_state": 6, "headdim": 8, "ngroups": 2},
        "d_intermediate": 0,
        "attn_layer_idx": [],
        "attn_cfg": {},
        "tie_embeddings": True,
    },
}


@pytest.fixture(params=CASES)
def published(request, tmp_path):
    """Transformers' model, its weights by the authors' names, and the folder as the authors publish it."""
    model = peer(request.param, vocab_size=56, tie_word_embeddings=True)
    weights = {name.replace("embeddings", "embedding"): tensor.clone() for name, tensor in model.state_dict().items()}
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | CASES[request.param] | {"pad_vocab_size_multiple": 8}))
    torch.save(weights, tmp_path / "pytorch_model.bin")
    return model, weights, tmp_path


def rms_norm(x, n_groups=1):
    groups = x.view(n_groups, -1)
    return (groups / (groups.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()).flatten()


def mamba(w, x, window, h):
    u, z = (w["in_proj.weight"] @ x).chunk(2)
    window = torch.cat([window, u[None]])[1:]
    u = functional.silu((window * w["conv1d.weight"][:, 0].T).sum(0) + w["conv1d.bias"])
    dt, b, c = (w["x_proj.weight"] @ u).split([3, 5, 5])
    dt = functional.softplus(w["dt_proj.weight"] @ dt + w["dt_proj.bias"])[:, None]
    h = torch.exp(dt * -torch.exp(w["A_log"])) * h + dt * b * u[:, None]
    return w["out_proj.weight"] @ ((h @ c + w["D"] * u) * functional.silu(z)), window, h


def mamba2(w, x, window, h):
    z, u, dt = (w["in_proj.weight"] @ x).split([48, 72, 6])
    window = torch.cat([window, u[None]])[1:]
    u = functional.silu((window * w["conv1d.weight"][:, 0].T).sum(0) + w["conv1d.bias"])
    u, b, c = u[:48].view(6, 8, 1), u[48:60].view(2, 6), u[60:].view(2, 6)
    b, c = (part.repeat_interleave(3, 0)[:, None] for part in (b, c))  # three heads a group
    dt = functional.softplus(dt + w["dt_bias"])[:, None, None]
    h = torch.exp(dt * -torch.exp(w["A_log"])[:, None, None]) * h + dt * u * b
    y = (h * c).sum(-1) + w["D"][:, None] * u[..., 0]
    return w["out_proj.weight"] @ (rms_norm(y.flatten() * functional.silu(z), 2) * w["norm.weight"]), window, h


LAYERS = {"mamba": (mamba, (3, 48), (48, 5)), "mamba2": (mamba2, (4, 72), (6, 8, 6))}
"""The step of a layer, and the shapes of its window and its state."""


def authors_logits(weights, tokens, kind):
    """Mamba (arXiv 2312.00752, algorithm 2) or Mamba-2 (2405.21060, section 7), token by token in float64."""
    weights = {name: tensor.double() for name, tensor in weights.items()}
    layer, *shapes = LAYERS[kind]
    carried = [[torch.zeros(shape, dtype=torch.float64) for shape in shapes] for _ in range(2)]
    for token in tokens:
        x = weights["backbone.embedding.weight"][token]
        for number in range(2):
            prefix = f"backbone.layers.{number}."
            w = {name.removeprefix(f"{prefix}mixer."): tensor for name, tensor in weights.items()}
            y, *carried[number] = layer(w, rms_norm(x) * weights[f"{prefix}norm.weight"], *carried[number])
            x = x + y
        yield weights["lm_head.weight"] @ (rms_norm(x) * weights["backbone.norm_f.weight"])


@torch.inference_mode()
def test_logits_are_those_of_transformers_and_of_the_equations(published):
    theirs, weights, folder = published
    model = from_huggingface(folder).model
    found = model(TOKENS)[0]
    torch.testing.assert_close(found, theirs(TOKENS, use_cache=False).logits, rtol=1e-5, atol=1e-5)
    expected = torch.stack(list(authors_logits(weights, TOKENS[0], theirs.config.model_type)))
    torch.testing.assert_close(found[0], expected.float(), rtol=1e-5, atol=1e-5)
    assert _format_of(folder) == "published"


def test_weights_are_mapped_unless_they_are_of_before_pytorch_1_6(published, monkeypatch):
    _, weights, folder = published
    file, load, mapped = folder / "pytorch_model.bin", torch.load, []
    monkeypatch.setattr(torch, "load", lambda *a, mmap, **b: mapped.append(mmap) or load(*a, mmap=mmap, **b))
    expected = from_huggingface(folder).model.state_dict()
    torch.save(weights, file, _use_new_zipfile_serialization=False)
    found = from_huggingface(folder).model.state_dict()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert mapped == [True, False]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attn_layer_idx": [1]}, r"attn_layer_idx in .*config\.json is \[1\], which is not supported; expected \[\]"),
        ({"d_intermediate": 64}, "d_intermediate in .* is 64, which is not supported; expected 0"),
        ({"ssm_cfg": {"layer": "Mamba3"}}, "layer in ssm_cfg in .* is 'Mamba3'; expected one of Mamba1, Mamba2"),
        ({"ssm_cfg": {"warp": 9}}, "ssm_cfg in .* is one with warp; expected no entries that this converter does not"),
        ({"ssm_cfg": [4]}, r"ssm_cfg in .* is \[4\]; expected an object"),
        ({"rms_norm": False}, "rms_norm in .* is False, which is not supported; expected True"),
        ({"n_layer": 0}, "n_layer in .* is 0; expected a whole number from 1"),
        ({"warp_drive": 9}, "is one with warp_drive; expected no entries that this converter does not know"),
    ],
    ids=str,
)
def test_what_is_not_supported_is_refused_by_name(tmp_path, change, message):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | change))
    with pytest.raises(ValueError, match=message):
        from_huggingface(tmp_path)
