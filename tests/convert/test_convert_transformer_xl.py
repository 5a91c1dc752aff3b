"""Published Transformer-XL weights against the published equations, read straight from the weights by their own names.

The oracle goes word by word and pair by pair and shares nothing with the package: no tensors over time, no shift, no
state, no batch.
"""

import itertools
import math

import pytest
import torch

from recurra.convert.transformer_xl import transformer_xl_from_original

VOCABULARY, D_MODEL, HEADS, D_HEAD, D_INNER, LAYERS = 13, 8, 2, 3, 10, 2
CUTOFFS = [4, 7, 10]
SEGMENT, MEMORY = 4, 6
ASKED = {"segment_length": SEGMENT, "mem_len": MEMORY, "norm": "post", "same_length": False, "clamp_len": None}
CASES = {
    "ptb": {},
    "wt103-base": {"cutoffs": CUTOFFS},
    "wt103-large": {"cutoffs": CUTOFFS, "div_val": 2},
    "narrow-embedding": {"cutoffs": CUTOFFS, "d_embedding": 6},
    "untied": {"cutoffs": CUTOFFS, "div_val": 2, "tie_embeddings": False, "tie_projections": [False] * 4},
    "own-biases": {"share_biases": False},
    "pre-norm": {"norm": "pre"},
    "same-length": {"same_length": True, "clamp_len": 3},
    "short-memory": {"mem_len": 2, "same_length": True},
}


def published_weights(cutoffs=(), div_val=1, d_embedding=D_MODEL, **options) -> dict[str, torch.Tensor]:
    """Random weights in float64, named and shaped as the original code saves them."""

    def draw(*shape, mean=0.0):
        return mean + 0.4 * torch.randn(*shape, dtype=torch.float64)

    channels, edges = HEADS * D_HEAD, [0, *cutoffs, VOCABULARY]
    tables = [VOCABULARY] if div_val == 1 else [high - low for low, high in itertools.pairwise(edges)]
    widths = [d_embedding // div_val**i for i in range(len(edges) - 1)]
    weights = {"pos_emb.inv_freq": (1 / 10000 ** (torch.arange(0.0, D_MODEL, 2.0) / D_MODEL)).double()}
    for i, rows in enumerate(tables):
        weights[f"word_emb.emb_layers.{i}.weight"] = draw(rows, widths[i])
        weights[f"crit.out_layers.{i}.weight"] = draw(rows, widths[i])
        weights[f"crit.out_layers.{i}.bias"] = draw(rows)
        if options.get("tie_embeddings", True):
            weights[f"crit.out_layers.{i}.weight"] = weights[f"word_emb.emb_layers.{i}.weight"]
    if div_val > 1 or d_embedding != D_MODEL:
        for i in range(len(tables)):
            weights[f"word_emb.emb_projs.{i}"] = draw(D_MODEL, widths[i])
        tied = options.get("tie_projections", [False] + [True] * len(cutoffs))
        for i in range(len(edges) - 1):
            weights[f"crit.out_projs.{i}"] = draw(D_MODEL, widths[i])
            if tied[i]:
                weights[f"crit.out_projs.{i}"] = weights[f"word_emb.emb_projs.{i if div_val > 1 else 0}"]
    if cutoffs:
        weights |= {"crit.cluster_weight": draw(len(cutoffs), d_embedding), "crit.cluster_bias": draw(len(cutoffs))}
    for layer in range(LAYERS):
        attention, feed_forward = f"layers.{layer}.dec_attn", f"layers.{layer}.pos_ff"
        weights[f"{attention}.qkv_net.weight"] = draw(3 * channels, D_MODEL)
        weights[f"{attention}.o_net.weight"] = draw(D_MODEL, channels)
        weights[f"{attention}.r_net.weight"] = draw(channels, D_MODEL)
        weights[f"{feed_forward}.CoreNet.0.weight"] = draw(D_INNER, D_MODEL)
        weights[f"{feed_forward}.CoreNet.0.bias"] = draw(D_INNER)
        weights[f"{feed_forward}.CoreNet.3.weight"] = draw(D_MODEL, D_INNER)
        weights[f"{feed_forward}.CoreNet.3.bias"] = draw(D_MODEL)
        for part in (attention, feed_forward):
            weights |= {f"{part}.layer_norm.weight": draw(D_MODEL, mean=1.0), f"{part}.layer_norm.bias": draw(D_MODEL)}
        if not options.get("share_biases", True):
            weights |= {f"{attention}.r_w_bias": draw(HEADS, D_HEAD), f"{attention}.r_r_bias": draw(HEADS, D_HEAD)}
    if options.get("share_biases", True):
        weights |= {"r_w_bias": draw(HEADS, D_HEAD), "r_r_bias": draw(HEADS, D_HEAD)}
    return weights


class Original:
    """What the original code computes for one stream, word by word."""

    def __init__(self, weights, cutoffs=(), div_val=1, norm="post", mem_len=MEMORY, **options):
        self.w, self.cutoffs, self.divided = weights, list(cutoffs), div_val > 1
        self.pre, self.mem_len = norm == "pre", mem_len
        self.same_length, self.clamp_len = options.get("same_length", False), options.get("clamp_len")
        self.natural_order = options.get("natural_order", False)
        self.edges = [0, *self.cutoffs, VOCABULARY]

    def run(self, stream):
        """Log-probabilities after every word, and the memories after every segment: one list of vectors per layer."""
        memories, log_probabilities, history = [[] for _ in range(LAYERS)], [], []
        for start in range(0, len(stream), SEGMENT):
            x = [self.embed(word) for word in stream[start : start + SEGMENT]]
            for layer in range(LAYERS):
                entered, memory = x, memories[layer]
                x = self.layer(layer, memory, entered)
                kept = (memory + entered)[max(0, len(memory) + len(entered) - self.mem_len) :]
                memories[layer] = kept
            history.append([list(memory) for memory in memories])
            log_probabilities += [self.log_probabilities(h) for h in x]
        return torch.stack(log_probabilities), history

    def embed(self, word):
        cluster = sum(word >= cutoff for cutoff in self.cutoffs) if self.divided else 0
        vector = self.w[f"word_emb.emb_layers.{cluster}.weight"][word - (self.edges[cluster] if self.divided else 0)]
        if f"word_emb.emb_projs.{cluster}" in self.w:
            vector = self.w[f"word_emb.emb_projs.{cluster}"] @ vector
        return vector * math.sqrt(D_MODEL)

    def norm(self, part, x):
        mean = sum(x.tolist()) / D_MODEL
        variance = sum((value - mean) ** 2 for value in x.tolist()) / D_MODEL
        scaled = (x - mean) / math.sqrt(variance + 1e-5)
        return scaled * self.w[f"{part}.layer_norm.weight"] + self.w[f"{part}.layer_norm.bias"]

    def layer(self, layer, memory, x):
        part, network = f"layers.{layer}.dec_attn", f"layers.{layer}.pos_ff"
        seen = [self.norm(part, h) for h in memory + x] if self.pre else memory + x
        outputs = []
        for i, own in enumerate(x):
            h = own + self.attend(part, seen, i, len(x))
            h = h if self.pre else self.norm(part, h)
            inner = self.norm(network, h) if self.pre else h
            inner = self.w[f"{network}.CoreNet.0.weight"] @ inner + self.w[f"{network}.CoreNet.0.bias"]
            inner = torch.where(inner > 0, inner, torch.zeros_like(inner))
            h = h + self.w[f"{network}.CoreNet.3.weight"] @ inner + self.w[f"{network}.CoreNet.3.bias"]
            outputs.append(h if self.pre else self.norm(network, h))
        return outputs

    def attend(self, part, seen, i, n_queries):
        w, query_at = self.w, len(seen) - n_queries + i
        biases = [w.get(f"{part}.{name}", w.get(name)) for name in ("r_w_bias", "r_r_bias")]
        heads = []
        for head in range(HEADS):
            q, k, v = (
                w[f"{part}.qkv_net.weight"][(kind * HEADS + head) * D_HEAD : (kind * HEADS + head + 1) * D_HEAD]
                for kind in range(3)
            )
            r = w[f"{part}.r_net.weight"][head * D_HEAD : (head + 1) * D_HEAD]
            query = q @ seen[query_at]
            scores = {}
            for j in range(query_at + 1):
                if self.same_length and j <= i - self.mask_shift(n_queries, len(seen)):
                    continue
                score = (query + biases[0][head]) @ (k @ seen[j])
                score = score + (query + biases[1][head]) @ (r @ self.position(query_at - j))
                scores[j] = math.exp(score.item() / math.sqrt(D_HEAD))
            heads.append(sum(share * (v @ seen[j]) for j, share in scores.items()) / sum(scores.values()))
        return w[f"{part}.o_net.weight"] @ torch.cat(heads)

    def mask_shift(self, n_queries, n_keys):
        """Row i may not see the columns up to i less this, in the original's own terms."""
        too_many = n_keys - self.mem_len
        return n_queries - too_many if too_many > 0 else n_queries

    def position(self, distance):
        if self.clamp_len is not None:
            distance = min(distance, self.clamp_len)
        angles = [distance * rate for rate in self.w["pos_emb.inv_freq"].tolist()]
        waves = [math.sin(angle) for angle in angles] + [math.cos(angle) for angle in angles]
        return torch.tensor(waves, dtype=torch.float64)

    def log_probabilities(self, h):
        def scores(cluster):
            table = cluster if self.divided else 0
            rows = range(self.edges[cluster], self.edges[cluster + 1])
            shift = self.edges[cluster] if self.divided else 0
            p = self.project(cluster, h)
            weight, bias = self.w[f"crit.out_layers.{table}.weight"], self.w[f"crit.out_layers.{table}.bias"]
            return [(weight[word - shift] @ p + bias[word - shift]).item() for word in rows]

        head = scores(0)
        if self.cutoffs:
            p = self.project(0, h)
            head += (self.w["crit.cluster_weight"] @ p + self.w["crit.cluster_bias"]).tolist()
        total = math.log(sum(map(math.exp, head)))
        found = [score - total for score in head[: self.edges[1]]]
        for cluster in range(1, len(self.edges) - 1):
            column = self.edges[1] + cluster - 1 if self.natural_order else -cluster
            tail = scores(cluster)
            within = math.log(sum(map(math.exp, tail)))
            found += [head[column] - total + score - within for score in tail]
        return torch.tensor(found, dtype=torch.float64)

    def project(self, cluster, h):
        projection = self.w.get(f"crit.out_projs.{cluster}")
        return h if projection is None else projection.T @ h


def convert(weights, **options):
    return transformer_xl_from_original(weights, **{**ASKED, **options})


@pytest.mark.parametrize("case", CASES)
def test_logits_memories_and_likelihoods_are_the_original_s(case):
    weights = published_weights(**CASES[case])
    model = convert(weights, **CASES[case])
    tokens, targets = torch.randint(VOCABULARY, (2, 3 * SEGMENT)), torch.randint(VOCABULARY, (2, 3 * SEGMENT))
    expected = [Original(weights, **CASES[case]).run(row.tolist()) for row in tokens]
    log_probabilities = torch.stack([found for found, _ in expected])
    state = None
    for number, segment in enumerate(tokens.split(SEGMENT, 1)):
        at = slice(number * SEGMENT, (number + 1) * SEGMENT)
        losses, _ = model.loss(segment, targets[:, at], state)
        logits, state = model(segment, state)
        close = {"rtol": 1e-9, "atol": 1e-9}
        torch.testing.assert_close(logits.log_softmax(-1), log_probabilities[:, at], **close)
        chosen = log_probabilities[:, at].gather(-1, targets[:, at, None])[..., 0]
        torch.testing.assert_close(losses, -chosen, **close)
        for layer, layer_state in enumerate(state.layers):
            memory = torch.stack([torch.stack(history[number][layer]) for _, history in expected])
            torch.testing.assert_close(layer_state.memory, memory, **close)


def hugging_face(weights):
    return {name if name.startswith("crit.") else f"transformer.{name}": value for name, value in weights.items()}


def test_hugging_face_s_names_and_its_order_of_clusters():
    options = {"cutoffs": CUTOFFS, "div_val": 2, "share_biases": False}
    weights, stream = published_weights(**options), torch.randint(VOCABULARY, (1, 9))
    found = convert(hugging_face(weights), **options)(stream)[0][0]
    expected, _ = Original(weights, **options, natural_order=True).run(stream[0].tolist())
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_the_order_of_clusters_can_be_said():
    weights, stream = published_weights(cutoffs=CUTOFFS), torch.randint(VOCABULARY, (1, 5))
    natural = convert(weights, cutoffs=CUTOFFS, cluster_order="natural")(stream)[0]
    default = convert(weights, cutoffs=CUTOFFS)(stream)[0]
    said = convert(hugging_face(weights), cutoffs=CUTOFFS, cluster_order="reversed")(stream)[0]
    assert torch.equal(said, default)
    assert not torch.allclose(natural, default)
    with pytest.raises(ValueError, match="cluster_order is 'backwards'; expected one of reversed, natural"):
        convert(weights, cutoffs=CUTOFFS, cluster_order="backwards")


def test_of_tied_weights_one_copy_is_enough():
    options = {"cutoffs": CUTOFFS, "div_val": 2}
    weights, stream = published_weights(**options), torch.randint(VOCABULARY, (1, 5))
    fewer = {
        name: tensor
        for name, tensor in weights.items()
        if name not in ("crit.out_layers.1.weight", "crit.out_projs.2", "pos_emb.inv_freq")
    }
    assert torch.equal(convert(fewer, **options)(stream)[0], convert(weights, **options)(stream)[0])


def test_shared_biases_may_stand_in_the_layers_too():
    weights, stream = published_weights(), torch.randint(VOCABULARY, (1, 5))
    copies = {f"layers.{layer}.dec_attn.{name}": weights[name] for layer in (0, 1) for name in ("r_w_bias", "r_r_bias")}
    assert torch.equal(convert({**weights, **copies})(stream)[0], convert(weights)(stream)[0])
    copies["layers.1.dec_attn.r_r_bias"] = copies["layers.1.dec_attn.r_r_bias"] + 1.0
    with pytest.raises(ValueError, match=r"r_r_bias and layers\.1\.dec_attn\.r_r_bias differ"):
        convert({**weights, **copies})


def test_a_missing_name_is_named():
    whole = published_weights(**CASES["untied"])
    for name in whole.keys() - {"pos_emb.inv_freq"}:
        weights = {other: tensor for other, tensor in whole.items() if other != name}
        with pytest.raises(ValueError, match=f"missing: .*{name}"):
            convert(weights, **CASES["untied"])


def test_unknown_names_are_named():
    weights = {**published_weights(), "layers.0.dec_attn.gate": torch.zeros(1), "r_emb": torch.zeros(1)}
    with pytest.raises(ValueError, match=r"unknown: layers\.0\.dec_attn\.gate, r_emb"):
        convert(weights)


def test_cutoffs_that_the_weights_cannot_tell_are_asked_for():
    with pytest.raises(ValueError, match=r"cutoffs is missing; expected the 3 words where the clusters .* end"):
        convert(published_weights(cutoffs=CUTOFFS))
    with pytest.raises(ValueError, match=r"unknown: crit\.cluster_bias, crit\.cluster_weight"):
        convert(published_weights(cutoffs=CUTOFFS), cutoffs=[])
    with pytest.raises(ValueError, match=r"crit\.cluster_weight .* is \(3, 8\); expected \(2, 8\)"):
        convert(published_weights(cutoffs=CUTOFFS), cutoffs=[4, 7])


def test_shapes_that_do_not_fit_are_named():
    weights = published_weights()
    weights["layers.1.pos_ff.CoreNet.3.weight"] = torch.zeros(D_MODEL, D_INNER + 1)
    with pytest.raises(ValueError, match=r"layers\.1\.pos_ff\.CoreNet\.3\.weight .* is \(8, 11\); expected \(8, 10\)"):
        convert(weights)


def test_weights_that_are_not_tied_are_not_taken_for_tied():
    with pytest.raises(ValueError, match=r"word_emb\.emb_layers\.0\.weight and crit\.out_layers\.0\.weight differ"):
        convert(published_weights(tie_embeddings=False))


def test_the_same_name_twice_is_refused():
    weights = published_weights()
    with pytest.raises(ValueError, match="with and without transformer"):
        convert({**weights, "transformer.r_w_bias": weights["r_w_bias"]})


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"d_modle": 8}, TypeError, "unexpected keyword argument 'd_modle'"),
        ({"n_heads": 3}, ValueError, "n_heads is given as 3; in the weights it is 2"),
        ({"share_biases": False}, ValueError, "share_biases is given as False; in the weights it is True"),
    ],
)
def test_options_are_checked(options, error, message):
    with pytest.raises(error, match=message):
        convert(published_weights(), **options)


@pytest.mark.parametrize("name", ["segment_length", "mem_len", "norm", "same_length", "clamp_len"])
def test_what_the_weights_do_not_tell_is_asked_for(name):
    """The last two of Hugging Face's weights alone: the two codes have other defaults."""
    given = {option: value for option, value in ASKED.items() if option != name}
    with pytest.raises(ValueError, match=f"{name} is missing; expected .*: the weights do not tell"):
        transformer_xl_from_original(hugging_face(published_weights()), **given)
    if name in ("same_length", "clamp_len"):
        assert transformer_xl_from_original(published_weights(), **given).config.clamp_len is None


def test_weights_of_absolute_attention_are_refused_plainly():
    weights = published_weights()
    weights["layers.0.dec_attn.kv_net.weight"] = torch.zeros(12, 8)
    with pytest.raises(ValueError, match="absolute attention is not supported"):
        convert(weights)
