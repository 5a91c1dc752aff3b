"""RWKV-7: the authors' .pth and fla's folders against the paper's equations, one token after the other in float64."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

from recurra.convert.portable import PortableModel
from recurra.convert.published.folder import from_huggingface, to_huggingface, to_pth
from recurra.models.language_model import LanguageModel, LanguageModelConfig
from recurra.state import tensors
from recurra.train.formats import _format_of

D, HEAD, LAYERS, HIDDEN, VOCABULARY = 12, 4, 3, 20, 17
VECTORS = (*(f"x_{name}" for name in "rwkvag"), "w0", "a0", "v0", "k_k", "k_a")
RANKS = {"w": 5, "a": 3, "v": 2, "g": 6}
TOKENS = torch.randint(VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(1))


def authors_weights(n_layer=LAYERS, dtype=torch.float64):
    """Random weights by the names of the authors' training code, whose first layer has v0, v1 and v2 in vain."""
    shapes = {"emb.weight": (VOCABULARY, D), "head.weight": (VOCABULARY, D), "ln_out.weight": (D,), "ln_out.bias": (D,)}
    for layer in range(n_layer):
        att, norms = f"blocks.{layer}.att.", ["ln0"] * (layer == 0) + ["ln1", "ln2", "att.ln_x"]
        shapes |= {f"blocks.{layer}.{norm}.{kind}": (D,) for norm in norms for kind in ("weight", "bias")}
        shapes |= {f"{att}{name}": (1, 1, D) for name in VECTORS}
        shapes |= {f"{att}{name}1": (D, rank) for name, rank in RANKS.items()}
        shapes |= {f"{att}{name}2": (rank, D) for name, rank in RANKS.items()}
        shapes |= {f"{att}{name}.weight": (D, D) for name in ("receptance", "key", "value", "output")}
        shapes[f"{att}r_k"] = (D // HEAD, HEAD)
        ffn = {"x_k": (1, 1, D), "key.weight": (HIDDEN, D), "value.weight": (D, HIDDEN)}
        shapes |= {f"blocks.{layer}.ffn.{name}": shape for name, shape in ffn.items()}
    generator = torch.Generator().manual_seed(0)
    return {name: 0.5 * torch.randn(shape, generator=generator, dtype=dtype) for name, shape in shapes.items()}


def by_fla(weights):
    """The same weights by the names of fla's class."""
    modules = {"emb": "model.embeddings", "ln_out": "model.norm", "head": "lm_head"}
    parts = {"att": "attn", "ffn": "ffn", "ln0": "pre_norm", "ln1": "attn_norm", "ln2": "ffn_norm"}
    linear = {"receptance": "r_proj", "key": "k_proj", "value": "v_proj", "output": "o_proj", "ln_x": "g_norm"}
    renamed = {}
    for name, tensor in weights.items():
        first, *rest = name.split(".")
        if first != "blocks":
            renamed[".".join([modules[first], *rest])] = tensor
            continue
        layer, part, last, *kind = rest
        if part == "att" and last in {f"{letter}{digit}" for letter in RANKS for digit in "012"}:
            if layer == "0" and last[0] == "v":
                continue
            tensor = tensor.flatten() if last[1] == "0" else tensor.T
            last = f"{last[0]}_lora.lora." + {"0": "2.bias", "1": "0.weight", "2": "2.weight"}[last[1]]
        elif part == "att" and last in linear:
            last = linear[last]
        elif not (part == "att" and last.startswith("x_")) and tensor.shape == (1, 1, D):
            tensor = tensor.flatten()
        renamed[".".join(["model.layers", layer, parts[part], last, *kind])] = tensor.contiguous()
    return renamed


CONFIG = {
    "model_type": "rwkv7",
    "vocab_size": VOCABULARY,
    "hidden_size": D,
    "num_hidden_layers": LAYERS,
    "head_dim": HEAD,
    "num_heads": 32,  # as in published folders: not read
    "intermediate_size": HIDDEN,
    "hidden_ratio": 4.0,
    "decay_low_rank_dim": 5,
    "a_low_rank_dim": 3,
    "v_low_rank_dim": 2,
    "gate_low_rank_dim": 6,
    "hidden_act": "sqrelu",
    "norm_first": True,
    "norm_bias": True,
    "norm_eps": 1e-5,
    "attn": None,
    "attn_mode": "chunk",
    "fuse_norm": True,
    "value_dim": [D] * LAYERS,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}


def norm(x, weights, name, epsilon=1e-5):
    return functional.layer_norm(x, x.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"], epsilon)


def time_mixing(w, x, before, s, first, epsilon):
    """The paper's layer: one token of one sequence; s is (H, values, keys)."""
    r_x, w_x, k_x, v_x, a_x, g_x = (x + w[f"x_{name}"].flatten() * (before - x) for name in "rwkvag")
    r, k, v = w["receptance.weight"] @ r_x, w["key.weight"] @ k_x, w["value.weight"] @ v_x
    decay = torch.exp(-math.exp(-0.5) * torch.sigmoid(w["w0"].flatten() + torch.tanh(w_x @ w["w1"]) @ w["w2"]))
    rate = torch.sigmoid(w["a0"].flatten() + a_x @ w["a1"] @ w["a2"])
    gate = torch.sigmoid(g_x @ w["g1"]) @ w["g2"]
    if first is None:
        first = v
    else:
        v = v + (first - v) * torch.sigmoid(w["v0"].flatten() + v_x @ w["v1"] @ w["v2"])
    removed = functional.normalize((k * w["k_k"].flatten()).view(-1, HEAD), dim=-1)
    k = k * (1 + (rate - 1) * w["k_a"].flatten())
    r, k, v, decay, rate = (y.view(-1, HEAD) for y in (r, k, v, decay, rate))
    transition = torch.diag_embed(decay) - removed[:, :, None] * (rate * removed)[:, None]
    s = s @ transition + v[:, :, None] * k[:, None]
    y = functional.layer_norm((s @ r[:, :, None])[..., 0], [HEAD], eps=epsilon).flatten()
    y = y * w["ln_x.weight"] + w["ln_x.bias"] + ((r * k * w["r_k"]).sum(-1, keepdim=True) * v).flatten()
    return w["output.weight"] @ (y * gate), s, first


def authors_logits(weights, tokens, epsilon=64e-5):
    """The logits of one sequence; tokens (L,)."""
    n_layer = sum(name.endswith("ffn.x_k") for name in weights)
    zeros = torch.zeros(D, dtype=torch.float64)
    states = [[zeros, torch.zeros(D // HEAD, HEAD, HEAD, dtype=torch.float64), zeros] for _ in range(n_layer)]
    logits = []
    for token in tokens:
        x, first = norm(weights["emb.weight"][token], weights, "blocks.0.ln0"), None
        for layer in range(n_layer):
            own = f"blocks.{layer}."
            time, channels = (
                {
                    name.removeprefix(own + part): tensor
                    for name, tensor in weights.items()
                    if name.startswith(own + part)
                }
                for part in ("att.", "ffn.")
            )
            given = norm(x, weights, f"{own}ln1")
            y, s, first = time_mixing(time, given, *states[layer][:2], first, epsilon)
            x = x + y
            also = norm(x, weights, f"{own}ln2")
            shifted = also + channels["x_k"].flatten() * (states[layer][2] - also)
            x = x + channels["value.weight"] @ torch.relu(channels["key.weight"] @ shifted).square()
            states[layer] = [given, s, also]
        logits.append(weights["head.weight"] @ norm(x, weights, "ln_out"))
    return torch.stack(logits)


def saved(kind, folder):
    """Save the model in one of its forms; return where, and the epsilon of the heads' norm."""
    if kind == "pth":
        torch.save(authors_weights(), folder / "model.pth")
        return folder / "model.pth", 64e-5
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(by_fla(authors_weights()), folder / "model.safetensors")
    return folder, HEAD * 1e-5


@pytest.fixture(params=["pth", "fla"])
def published(request, tmp_path):
    """The model as read, and the logits that the equations give."""
    path, epsilon = saved(request.param, tmp_path)
    model = from_huggingface(path, dtype=torch.float64).model
    return model, lambda weights, tokens: authors_logits(weights, tokens, epsilon)


def near(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


def test_logits_whole_in_pieces_and_by_steps_are_the_equations(published):
    model, equations = published
    expected = torch.stack([equations(authors_weights(), row) for row in TOKENS])
    for sizes in ([9], [4, 1, 4], [1] * 9):
        outputs, state = [], None
        for piece in TOKENS.split(sizes, 1):
            y, state = model(piece, state)
            outputs.append(y)
        near(torch.cat(outputs, 1), expected)


def test_padding_on_the_left_changes_nothing(published):
    model, equations = published
    mask = torch.arange(9) >= torch.tensor([[0], [4]])
    logits, _ = model(TOKENS, mask=mask)
    near(logits[1, 4:], equations(authors_weights(), TOKENS[1, 4:]))
    near(logits[0], equations(authors_weights(), TOKENS[0]))


def test_gradients_are_those_of_the_equations(published):
    model, equations = published
    weights = {name: tensor.requires_grad_() for name, tensor in authors_weights().items()}
    given = torch.randn(9, VOCABULARY, dtype=torch.float64)
    used = [name for name in weights if not name.startswith("blocks.0.att.v") or "value" in name]
    found = torch.autograd.grad(equations(weights, TOKENS[0]), [weights[name] for name in used], given)
    expected = dict(zip(used, found))
    model(TOKENS[:1])[0][0].backward(given)
    parameters = dict(model.named_parameters())
    time, second = "blocks.2.mixer.", "blocks.1.att."
    near(parameters[f"{time}shift"].grad, torch.cat([expected[f"{second}x_{name}"][0] for name in "rwkvag"]))
    near(parameters[f"{time}decay_bias"].grad, expected[f"{second}w0"].flatten())
    near(parameters[f"{time}value_projection.2.weight"].grad, expected[f"{second}v2"].T)
    near(parameters[f"{time}removal_scale"].grad, expected[f"{second}k_k"].flatten())
    near(parameters[f"{time}bonus"].grad, expected[f"{second}r_k"])
    near(parameters["blocks.0.mixer.value.weight"].grad, expected["blocks.0.att.value.weight"])
    near(parameters["embedding.weight"].grad, expected["emb.weight"])


def test_the_way_back(tmp_path):
    path, _ = saved("pth", tmp_path)
    assert _format_of(path) == "published"
    portable = from_huggingface(path, dtype=torch.float64)
    to_pth(portable, tmp_path / "again.pth")
    again, weights = torch.load(tmp_path / "again.pth"), authors_weights()
    assert weights.keys() - again.keys() == {f"blocks.0.att.v{digit}" for digit in range(3)}
    assert all(torch.equal(again[name], weights[name]) for name in again)
    folder, _ = saved("fla", tmp_path)
    to_huggingface(from_huggingface(folder, dtype=torch.float64), tmp_path / "theirs")
    again, weights = load_file(tmp_path / "theirs/model.safetensors"), by_fla(authors_weights())
    assert again.keys() == weights.keys()
    assert all(torch.equal(again[name], weights[name]) for name in again)
    entries = json.loads((tmp_path / "theirs/config.json").read_text())
    same = entries.keys() & CONFIG.keys() - {"num_heads"}
    assert {"head_dim", "v_low_rank_dim", "norm_eps", "norm_first"} <= same
    assert all(entries[key] == CONFIG[key] for key in same)


def test_one_layer_has_no_first_values_to_take(tmp_path):
    weights = authors_weights(1)
    torch.save(weights, tmp_path / "model.pth")
    model = from_huggingface(tmp_path / "model.pth", dtype=torch.float64).model
    near(model(TOKENS[:1])[0][0], authors_logits(weights, TOKENS[0]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"attn": {"layers": [1]}},
            r"attn in .*config\.json is \{'layers': \[1\]\}, which is not supported; expected None",
        ),
        ({"hidden_act": "silu"}, "hidden_act in .* is 'silu', which is not supported; expected 'sqrelu'"),
        ({"norm_bias": False}, "norm_bias in .* is False, which is not supported; expected True"),
        ({"value_dim": [24] * LAYERS}, "value_dim in .* which is not supported; expected None or 12"),
        ({"head_dim": 5}, "head_dim is 5; expected a divisor of hidden_size = 12"),
        ({"head_dim": None, "num_heads": None}, "head_dim is None; expected a divisor"),
        ({"warp_drive": 9}, "is one with warp_drive; expected no entries that this converter does not know"),
        ({"v_low_rank_dim": 4}, r"the shape of model\.layers\.1\.attn\.v_lora\.lora\.0\.weight in .* is \(2, 12\)"),
        ({"norm_first": False}, r"unknown: model\.layers\.0\.pre_norm\.bias"),
    ],
    ids=str,
)
def test_what_is_not_supported_is_refused_by_name(tmp_path, change, message):
    folder, _ = saved("fla", tmp_path)
    (folder / "config.json").write_text(json.dumps(CONFIG | change))
    with pytest.raises(ValueError, match=message):
        from_huggingface(folder)


@pytest.mark.parametrize(
    ("key", "tensor", "message"),
    [
        ("emb.weight", None, r"emb\.weight in .*model\.pth is none; expected a matrix, as in an RWKV-7 model"),
        ("blocks.0.att.r_k", torch.ones(D), r"blocks\.0\.att\.r_k in .* is one of shape \(12,\); expected a matrix"),
        ("blocks.1.att.w0", None, r"missing: blocks\.1\.att\.w0"),
        (
            "blocks.1.att.s_emb.weight",
            torch.ones(3, D),
            r"unknown: blocks\.1\.att\.s_emb\.weight",
        ),  # of a later version
    ],
)
def test_a_pth_of_another_model_is_refused(tmp_path, key, tensor, message):
    weights = authors_weights()
    weights.pop(key, None)
    torch.save(weights | ({} if tensor is None else {key: tensor}), tmp_path / "model.pth")
    with pytest.raises(ValueError, match=message):
        from_huggingface(tmp_path / "model.pth")


def make(mixers=("rwkv7", "rwkv7-channel-mixing") * 2, time=None, **changes):
    options = {"rwkv7": {"n_heads": 3, **(time or {})}}
    shape = {
        "n_layer": len(mixers),
        "d_model": D,
        "d_channel_mixing": 0,
        "biases": False,
        "embedding_norm": True,
    } | changes
    torch.manual_seed(0)
    config = LanguageModelConfig(VOCABULARY, mixer=list(mixers), mixer_options=options, **shape)
    return PortableModel(LanguageModel(config).eval(), None)


def test_our_own_model_is_read_again(tmp_path):
    ours = make()
    to_pth(ours, tmp_path / "model.pth")
    expected, found = (model(TOKENS) for model in (ours.model, from_huggingface(tmp_path / "model.pth").model))
    assert all(map(torch.equal, (expected[0], *tensors(expected[1])), (found[0], *tensors(found[1]))))


@pytest.mark.parametrize(
    ("model", "write", "message"),
    [
        (lambda: make(embedding_norm=False), to_pth, "embedding_norm False instead of True"),
        (lambda: make(time={"norm_epsilon": 1e-3}), to_pth, "norm_epsilon 0.001 instead of 0.00064 of rwkv7"),
        (make, to_huggingface, "norm_epsilon 0.00064 instead of 4e-05 of rwkv7"),
        (lambda: make(norm="rms"), to_pth, "norm 'rms' instead of 'layer'"),
        (lambda: make(["rwkv7"] * 2), to_pth, "mixer"),
    ],
)
def test_other_models_are_not_written(tmp_path, model, write, message):
    with pytest.raises(ValueError, match=message):
        write(model(), tmp_path / "no.pth")
    assert not (tmp_path / "no.pth").exists()
