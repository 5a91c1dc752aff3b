"""GGUF files: written and read back, against llama.cpp itself, of other types, and damaged ones."""

import json
import math
from typing import Literal

import numpy as np
import pytest
import torch

pytest.importorskip("gguf", reason="needs the extra hf: pip install recurra[hf]")

import gguf
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from recurra.convert.portable import PortableModel
from recurra.convert.published import gguf_file
from recurra.convert.published._gguf_tokenizer import read_tokenizer
from recurra.convert.published.folder import from_huggingface
from recurra.convert.published.gguf_file import to_gguf
from recurra.data.tokenizers import BytePairEncoding, Vocabulary
from recurra.models.language_model import LanguageModel, LanguageModelConfig

TEXT = "a cat and a dog\nthe dog saw a cat\nthe cat ran away, and so did the dog: 1984 it's\n"
TOKENS = torch.randint(304, (2, 19), generator=torch.Generator().manual_seed(0))
ATTENTION = {"n_heads": 4, "n_kv_heads": 2, "rotated_share": 0.0, "window": None}
JAMBA = {"dt_rank": 32, "selection_norm": 1e-5, "selection_scales": True}
MODELS = {
    "mamba": {"mixer": "mamba", "mixer_options": {"dt_rank": 32}, "tie_embeddings": True},
    "falcon-mamba": {"mixer": "mamba", "mixer_options": {"selection_norm": 1e-5}},
    "mamba2": {"mixer": "mamba2", "mixer_options": {"d_state": 16, "n_groups": 2, "n_heads": 4}},
    "jamba": {
        "mixer": ["mamba", "rotary-attention", "mamba"],
        "mixer_options": {"mamba": JAMBA, "rotary-attention": ATTENTION},
        "d_channel_mixing": 96,
        "feed_forward": "swiglu",
    },
}
EPSILON = {"norm_epsilon": 1e-6}
MAMBA2 = {"d_state": 16, "n_groups": 2, "n_heads": 4}
SCALES = {"embedding_scale": 2.3, "residual_scale": 0.7, "logit_scale": 0.5}
DELTA = {"n_heads": 4, "n_qk_heads": 2, "d_qk": 32, "d_v": 64, "kernel_size": 3}
GATED = {"n_heads": 4, "n_kv_heads": 2, "d_head": 32, "rotated_share": 0.5, "rotation_base": 5e5, "window": None}
OF_GRANITE = {"rotary-attention": ATTENTION | {"query_scale": 0.8}, "mamba2": MAMBA2}
FALCON_H1 = {"d_state": 16, "n_groups": 2, "n_mamba_heads": 4, "d_inner": 64, "n_heads": 4, "n_kv_heads": 2}
OF_EXPERTS = {"n_experts": 5, "top_k": 3, "d_shared": 64}
HYBRIDS = {
    "granite": {"mixer": ["mamba2", "rotary-attention", "mamba2"], "mixer_options": OF_GRANITE, **SCALES},
    "granite-experts": {
        "mixer": ["mamba2", "mamba2", "rotary-attention"],
        "mixer_options": OF_GRANITE | {"rotary-attention": ATTENTION | {"rotated_share": 1.0}},
        "feed_forward": "mixture-of-experts",
        "feed_forward_options": OF_EXPERTS,
        "tie_embeddings": True,
    },
    "falcon-h1": {
        "mixer": "mamba2-attention",
        "mixer_options": FALCON_H1 | {"norm": "after", "d_head": 32, "window": None},
        **(SCALES | {"residual_scale": 1.0}),
    },
    "falcon-h1-tied": {
        "mixer": "mamba2-attention",
        "mixer_options": FALCON_H1 | {"norm": None, "window": None},
        "tie_embeddings": True,
        **(SCALES | {"residual_scale": 1.0}),
    },
    "lfm2": {
        "mixer": ["short-conv", "rotary-attention", "short-conv"],
        "mixer_options": {
            "short-conv": {"kernel_size": 3, "biases": False},
            "rotary-attention": ATTENTION | {"rotated_share": 1.0, "rotation_base": 1e6, "qk_norm": 1e-5},
        },
        "tie_embeddings": True,
    },
    "qwen3.5": {
        "mixer": ["gated-delta-net", "gated-attention", "gated-delta-net", "gated-attention"],
        "mixer_options": {"gated-delta-net": DELTA | EPSILON, "gated-attention": GATED | EPSILON},
        **EPSILON,
    },
    "rwkv7": {
        "mixer": ["rwkv7", "rwkv7-channel-mixing", "rwkv7", "rwkv7-channel-mixing"],
        "mixer_options": {"rwkv7": {"n_heads": 2, "gate_rank": 5}, "rwkv7-channel-mixing": {"d_hidden": 96}},
        "norm": "layer",
        "embedding_norm": True,
        "d_channel_mixing": 0,
        "feed_forward": "gelu",
    },
}
MODELS |= {name: {"d_channel_mixing": 96, "feed_forward": "swiglu", **shape} for name, shape in HYBRIDS.items()}


@pytest.fixture(scope="module")
def tokenizer():
    return BytePairEncoding.train([TEXT], 290)


def made(name, tokenizer, seed=1, d_model=64):
    """A model with random weights that says printable tokens."""
    torch.manual_seed(seed)
    shape = {"d_channel_mixing": 0, "norm": "rms", "biases": False, "norm_epsilon": 1e-5, **MODELS[name]}
    n_layer = len(shape["mixer"]) if isinstance(shape["mixer"], list) else 2
    model = LanguageModel(LanguageModelConfig(304, None, n_layer, d_model, **shape)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3)
        texts = [tokenizer.decode([token]) for token in range(len(tokenizer))]
        silent = [token for token, text in enumerate(texts) if not text.isascii() or not text.isprintable()]
        model.get_parameter("embedding.weight" if model.config.tie_embeddings else "head.weight")[
            [*silent, *range(len(texts), 304)]
        ] = 0
    return PortableModel(model, tokenizer)


def rounding(weight, name, dtype):
    """The largest error of each number: half a unit in the last place of its format."""
    if name.endswith(("log_decay", "A_log")):  # A in float32: its relative error, and this one's
        return 2**-24 * (1 + weight.abs())
    if "norm" in name and ".mixer.norm" not in name:  # Qwen's are 1 less in transformers: four sums
        return 2**-22 * (1 + weight.abs())
    if dtype == "f32" or weight.dim() < 2 or "convolution" in name:
        return torch.zeros_like(weight)
    if dtype == "f16":
        return weight.abs() * 2**-11 + 2**-25
    if dtype == "q4_0":  # x = d (q - 8) with d = -max / 8 in float16: what lies opposite of the largest is cut at 7 d
        return (weight.abs().amax(-1, keepdim=True) * (1 / 8 + 2**-11)).expand_as(weight)
    # Q8_0: x = d q, d = max / 127 in float16, and q is rounded; a block has at most the largest number of its row
    return (weight.abs().amax(-1, keepdim=True) / 127 * (0.5 + 127 * 2**-11)).expand_as(weight)


@pytest.mark.parametrize("dtype", ["f32", "f16", "q8_0", "q4_0"])
@pytest.mark.parametrize("name", MODELS)
def test_what_was_written_is_read_within_its_rounding(name, dtype, tokenizer, tmp_path):
    portable = made(name, tokenizer)
    to_gguf(portable, tmp_path / "model.gguf", dtype=dtype)
    found = from_huggingface(tmp_path / "model.gguf")
    if dtype == "f32":
        torch.testing.assert_close(found.model(TOKENS)[0], portable.model(TOKENS)[0], rtol=1e-5, atol=1e-5)
    assert found.tokenizer.fingerprint == tokenizer.fingerprint
    rounded, config = 0, portable.model.config
    folded = {"embedding.weight": config.embedding_scale, "head.weight": config.logit_scale}
    for key, weight in portable.model.named_parameters():
        if name.startswith("falcon-h1"):
            key = key.replace("head.linear", "head")
            weight = weight * folded.get(key, 1)
        error = (found.model.get_parameter(key) - weight).abs()
        assert (error <= rounding(weight, key, dtype)).all(), key
        rounded += int(error.any() and not key.endswith(("log_decay", "A_log")) and "norm" not in key)
    assert bool(rounded) == (dtype != "f32")


def llama_cpp(path, text, n_tokens):
    """How llama.cpp continues a text, how many tokens it reads, and its first logarithms of probabilities."""
    xllamacpp = pytest.importorskip("xllamacpp")
    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_ctx, params.n_parallel, params.n_gpu_layers = 256, 1, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED  # it rounds to float16
    params.verbosity, params.fit_params, params.warmup = -1, False, False
    asked = {
        "prompt": text,
        "n_predict": n_tokens,
        "temperature": 0.0,
        "samplers": ["top_k"],
        "top_k": 1,
        "logprobs": 9,
    }
    reply = xllamacpp.Server(params).handle_completions(asked)
    reply = json.loads(reply) if isinstance(reply, (str, bytes)) else reply
    choice = reply["choices"][0]
    first = {each["id"]: each["logprob"] for each in choice["logprobs"]["content"][0]["top_logprobs"]}
    return choice["text"], reply["usage"]["prompt_tokens"], first


@torch.inference_mode()
def ours(portable, text, n_tokens):
    """The same of our model, and the least distance of a token from the next best, in standard deviations."""
    tokens = portable.tokenizer.encode(text).tolist()
    n_read, margin, first = len(tokens), math.inf, None
    logits, state = portable.model(torch.tensor([tokens]))
    for _ in range(n_tokens):
        logits = logits[0, -1]
        first = logits.log_softmax(-1) if first is None else first
        best, next_best = logits.topk(2).values.tolist()
        margin = min(margin, (best - next_best) / float(logits.std()))
        tokens.append(int(logits.argmax()))
        logits, state = portable.model(torch.tensor([tokens[-1:]]), state)
    return portable.tokenizer.decode(tokens[n_read:]), n_read, first, margin


# llama.cpp also rounds the inputs of matrices that it keeps in less than float32: a token may be close to the next
@pytest.mark.parametrize(
    ("name", "dtype", "n_tokens", "least"),
    [*((name, "f32", 20, 1e-3) for name in MODELS), ("mamba", "f16", 20, 2e-2), ("mamba2", "q8_0", 4, 0.3)],
)
def test_llama_cpp_continues_a_text_as_our_model_does(name, dtype, n_tokens, least, tokenizer, tmp_path):
    path, text, margin = tmp_path / "model.gguf", "the dog saw it's 1984,\n a  cat", 0.0
    for seed in range(1000):
        if margin < least:
            portable = made(name, tokenizer, seed)
            *expected, first, margin = ours(portable, text, n_tokens)
    to_gguf(portable, path, dtype=dtype)
    *found, theirs = llama_cpp(path, text, n_tokens)
    assert found == expected
    if dtype == "f32":
        torch.testing.assert_close(first[list(theirs)], torch.tensor(list(theirs.values())), rtol=0, atol=1e-4)


def q4_k(values):
    """Blocks of 256 numbers 5/128 q, for q from -8 to 7: d = dmin / 8 = 1/128, and 5 for all scales and minima."""
    q = np.round(values / (5 / 128) + 8).astype(np.uint8).reshape(-1, 4, 2, 32)
    head = np.frombuffer(np.array([1 / 128, 8 / 128], np.float16).tobytes() + bytes([5] * 8 + [0x55] * 4), np.uint8)
    nibbles = (q[:, :, 0] | q[:, :, 1] << 4).reshape(-1, 128)
    blocks = np.concatenate([np.tile(head, (len(q), 1)), nibbles], 1)
    return blocks.reshape(len(values), -1)


def test_weights_of_four_bits(tokenizer, tmp_path, monkeypatch):
    portable, quantize = made("mamba", tokenizer, d_model=256), gguf.quantize
    with torch.no_grad():
        for parameter in portable.model.parameters():
            parameter.copy_((parameter / (5 / 128)).round().clamp(-8, 7) * (5 / 128))
    of_four_bits = gguf.GGMLQuantizationType.Q4_K
    monkeypatch.setattr(gguf, "quantize", lambda a, kind: q4_k(a) if kind == of_four_bits else quantize(a, kind))
    monkeypatch.setattr(gguf_file, "GgufType", Literal["q4_k", "q4_0", "bf16"])
    for dtype, step in (("q4_k", 0), ("q4_0", 1 / 8 + 2**-11), ("bf16", 2**-8)):
        to_gguf(portable, tmp_path / "model.gguf", dtype=dtype)
        kinds = {tensor.tensor_type.name for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
        assert dtype.upper() in kinds
        found = from_huggingface(tmp_path / "model.gguf").model
        for name, weight in portable.model.named_parameters():
            bound = weight.abs().amax() * step + (2**-22 if name.endswith("log_decay") else 0)
            assert ((found.get_parameter(name) - weight).abs() <= bound).all(), name


TEXTS = ["the dog saw a cat", " it's 1984, \u65e5\u672c caf\u00e9\n\tand  <|endoftext|>so"]
CUTS = {
    "gpt-2": [pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "falcon": [
        pre_tokenizers.Punctuation("contiguous"),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        pre_tokenizers.Digits(individual_digits=False),
        pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), "isolated"),
    ],
}


def pieces():
    """SentencePiece's kind of byte pairs, with a first token."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"\u2581thedogcaswr"]
    merges = [("h", "e"), ("t", "he"), ("\u2581", "the"), ("o", "g"), ("d", "og"), ("\u2581", "dog"), ("a", "t")]
    words = list(dict.fromkeys([*words, *map("".join, merges)]))
    numbers = {word: number for number, word in enumerate(words)}
    made = Tokenizer(models.BPE(numbers, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    blank = decoders.Replace("\u2581", " ")
    made.decoder = decoders.Sequence([blank, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    made.add_special_tokens([AddedToken("<s>", normalized=False), AddedToken("</s>", normalized=False)])
    made.post_processor = processors.TemplateProcessing(single=["<s>", "$A"], special_tokens=[("<s>", 1)])
    return BytePairEncoding(made)


def byte_pairs(tokenizer, cuts):
    content = json.loads(tokenizer.to_json())
    made = Tokenizer(models.BPE(content["model"]["vocab"], [tuple(pair) for pair in content["model"]["merges"]]))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Sequence(CUTS[cuts]), decoders.ByteLevel()
    made.add_special_tokens(["<|endoftext|>"])
    return BytePairEncoding(made)


@pytest.mark.parametrize("kind", [*CUTS, "llama"])
def test_tokenizers_that_llama_cpp_wrote(kind, tokenizer, tmp_path):
    own = pieces() if kind == "llama" else byte_pairs(tokenizer, kind)
    portable, path = made("mamba", tokenizer)._replace(tokenizer=own), tmp_path / "model.gguf"
    to_gguf(portable, path)
    metadata, _ = gguf_file._read(path)
    assert metadata.pop("tokenizer.huggingface.json")
    assert metadata["tokenizer.ggml.eos_token_id"] == own.encode("</s>" if kind == "llama" else "<|endoftext|>")[-1]
    found = read_tokenizer(metadata, "model.gguf")
    assert (len(found), found.start) == (len(own), own.start)
    for text in TEXTS:
        assert found.encode(text).tolist() == own.encode(text).tolist()
        assert found.decode(found.encode(text)) == own.decode(own.encode(text))
    assert llama_cpp(path, TEXTS[0], 1)[1] == len(own.start) + len(own.encode(TEXTS[0]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"general.architecture": "llama"}, "general.architecture in .* is 'llama'; expected one of mamba, mamba2, ja"),
        ({"mamba.ssm.state_size": None}, "ssm.state_size in .* is missing; expected a whole number from 1"),
        ({"mamba.attention.layer_norm_rms_epsilon": None}, "rms_epsilon in .* is missing; expected a finite number"),
        ({"mamba.ssm.state_size": 8}, r"the shape of blk\.0\.ssm_a in .* is \(128, 16\); expected \(128, 8\), as its"),
        ({"mamba.ssm.inner_size": 100}, "ssm.inner_size is 100; expected a multiple of embedding_length = 64"),
        ({"tokenizer.ggml.pre": "tekken"}, "tokenizer.ggml.pre in .* is 'tekken'; expected one of gpt-2, llama-bpe"),
        ({"tokenizer.ggml.model": "t5"}, "tokenizer.ggml.model in .* is 't5'; expected one of gpt2, llama"),
        ({"tokenizer.ggml.tokens": [3]}, "tokenizer.ggml.tokens in .* is .*; expected a list of str"),
        (
            {"blk.1.ssm_d": None},
            r"is not one model's \(missing: blk\.1\.ssm_d\); expected the weights of a whole model",
        ),
        ({"token_embd.weight": None}, r"is not one model's \(missing: token_embd\.weight\)"),
        ({"blk.9.extra": np.zeros(3, np.float32)}, r"is not one model's \(unknown: blk\.9\.extra\)"),
        ({"blk.1.ssm_d": np.full(128, np.nan, np.float32)}, "D in .* is a tensor with numbers that are not finite"),
        ({"blk.1.ssm_d": np.zeros(128, np.int32)}, r"the type of blk\.1\.ssm_d in .* is I32; expected F32, F16, BF16"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(change, message, tokenizer, tmp_path, monkeypatch):
    path = tmp_path / "model.gguf"
    to_gguf(made("mamba", tokenizer), path)
    metadata, tensors = gguf_file._read(path)
    metadata["tokenizer.huggingface.json"] = None
    ((key, value),) = change.items()
    if isinstance(value, np.ndarray):
        kind = gguf.GGMLQuantizationType[{"float32": "F32", "int32": "I32"}[value.dtype.name]]
        value = gguf.ReaderTensor(key, kind, np.array(value.shape), 0, 0, 0, value, None)
    (tensors if key.endswith(("ssm_d", "embd.weight", "extra")) else metadata)[key] = value
    parts = [{name: part for name, part in each.items() if part is not None} for each in (metadata, tensors)]
    monkeypatch.setattr(gguf_file, "_read", lambda path: parts)
    with pytest.raises(ValueError, match=message):
        from_huggingface(path)


def altered(name, tokenizer, path, monkeypatch, **changes):
    """Write a model and let its file be read with other entries of the metadata."""
    portable = made(name, tokenizer)
    to_gguf(portable, path)
    metadata, tensors = gguf_file._read(path)
    kind = metadata["general.architecture"]
    metadata |= {f"{kind}.{key}": value for key, value in changes.items()}
    monkeypatch.setattr(gguf_file, "_read", lambda path: (metadata, tensors))
    return portable, tensors


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("granite-experts", {"rope.scaling.type": "yarn"}, "rope.scaling.type in .* is 'yarn', which is not supported"),
        ("lfm2", {"rope.scale_linear": 2.0}, "rope.scale_linear in .* is 2.0, which is not supported; expected 1.0"),
        (
            "falcon-h1",
            {"rope.dimension_count": 16},
            "rope.dimension_count in .* is 16; expected a whole number from 32",
        ),
        ("lfm2", {"attention.sliding_window": 7}, "attention.sliding_window in .* is 7, which is not supported"),
        ("granite", {"attention.head_count": 65}, "attention.head_count is 65; expected a divisor of embedding_length"),
        (
            "qwen3.5",
            {"nextn_predict_layers": 4},
            "nextn_predict_layers in .* is 4; expected a whole number from 0 to 3",
        ),
    ],
    ids=str,
)
def test_metadata_that_changes_a_result_is_refused(name, changes, message, tokenizer, tmp_path, monkeypatch):
    altered(name, tokenizer, tmp_path / "model.gguf", monkeypatch, **changes)
    with pytest.raises(ValueError, match=message):
        from_huggingface(tmp_path / "model.gguf")


def test_last_blocks_that_predict_further_ahead_are_dropped(tokenizer, tmp_path, monkeypatch):
    path = tmp_path / "model.gguf"
    portable, tensors = altered("qwen3.5", tokenizer, path, monkeypatch, block_count=5, nextn_predict_layers=1)
    tensors["blk.4.nextn.eh_proj.weight"] = tensors["token_embd.weight"]
    torch.testing.assert_close(from_huggingface(path).model(TOKENS)[0], portable.model(TOKENS)[0], rtol=0.1, atol=0.1)


def test_a_scale_of_attention_of_1_is_not_a_missing_one(tokenizer, tmp_path):
    portable = made("granite-experts", tokenizer)  # its scale is 1 / 4
    portable.model.config.mixer_options["rotary-attention"]["query_scale"] = 4.0
    portable = PortableModel(LanguageModel(portable.model.config).eval(), tokenizer)
    to_gguf(portable, tmp_path / "model.gguf", dtype="f32")
    found = from_huggingface(tmp_path / "model.gguf").model
    torch.testing.assert_close(found(TOKENS)[0], portable.model(TOKENS)[0], rtol=1e-5, atol=1e-5)


def test_a_vector_in_place_of_the_embedding_and_large_halves(tokenizer, tmp_path, monkeypatch):
    portable, tensors = altered("mamba", tokenizer, tmp_path / "model.gguf", monkeypatch)
    tensors["token_embd.weight"] = tensors["token_embd.weight"]._replace(shape=np.array([], np.int64))
    with pytest.raises(ValueError, match=r"missing: token_embd\.weight"):
        from_huggingface(tmp_path / "model.gguf")
    with torch.no_grad():
        portable.model.get_parameter("embedding.weight")[3, 5] = -7e4
    with pytest.raises(ValueError, match=r"token_embd\.weight is .*7e\+04.*; expected finite numbers up to 6.55e\+04"):
        to_gguf(portable, tmp_path / "large.gguf")
    assert not (tmp_path / "large.gguf").exists()


def test_damaged_files_are_refused_in_a_sentence(tokenizer, tmp_path):
    path, wanted = tmp_path / "model.gguf", "expected a whole file, little-endian and of version 2 or 3"
    to_gguf(made("mamba", tokenizer), path)
    whole = path.read_bytes()
    kind = whole.index(b"blk.0.ssm_a") + len("blk.0.ssm_a") + 4 + 2 * 8  # behind its name and shape
    damaged = {
        "it ends too early": [whole[:end] for end in (0, 3, 20, 500, whole.index(b"blk.0"), len(whole) - 99)],
        "GGUF magic invalid": [b"GGML" + whole[4:]],
        "version 9 which": [whole[:4] + b"\x09" + whole[5:]],
        "99) is not a valid": [whole[:kind] + b"\x63" + whole[kind + 1 :]],
    }
    for reason, contents in damaged.items():
        for content in contents:
            path.write_bytes(content)
            with pytest.raises(ValueError, match=rf"model\.gguf is not readable as GGUF \(.*; {wanted}") as error:
                from_huggingface(path)
            assert reason in str(error.value) or not content
    writer = gguf.GGUFWriter(path, "mamba", endianess=gguf.GGUFEndian.BIG)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with pytest.raises(ValueError, match=f"is a big-endian GGUF file; {wanted}"):
        from_huggingface(path)


def test_what_llama_cpp_does_not_have_is_refused(tokenizer, tmp_path, monkeypatch):
    shape = {"d_channel_mixing": 0, "norm": "rms", "biases": False}
    xlstm = {"mixer": "mlstm", "d_channel_mixing": 64, "feed_forward": "swiglu", "norm_epsilon": 1e-6}
    selective = {"mixer": ["mamba"], "mixer_options": {"mamba": {"selection_norm": 1e-5, "selection_scales": True}}}
    experts = {"feed_forward": "mixture-of-experts", "feed_forward_options": {"normalise": False, "n_experts": 4}}
    for options, message in [
        (selective | experts | {"d_channel_mixing": 64}, "n_experts is 4; expected no mixtures of experts, which are"),
        ({"mixer": "mamba", "mixer_options": {"expand": 3}}, "expand is 3; expected 2, all that llama.cpp reads"),
        ({"mixer": "mamba", "mixer_options": {"selection_norm": 1e-3}}, "selection_norm is 0.001; expected norm_eps"),
        (xlstm | {"logit_cap": 30.0}, "model is a xLSTMForCausalLM; expected one that llama.cpp has"),
    ]:
        model = LanguageModel(LanguageModelConfig(304, None, 1, 64, **shape | options))
        with pytest.raises(ValueError, match=message):
            to_gguf(PortableModel(model, tokenizer), tmp_path / "model.gguf")
    wide = {"mamba2": MAMBA2 | {"expand": 1}, "rotary-attention": ATTENTION}
    apart = {"gated-delta-net": DELTA | EPSILON | {"d_qk": 16}, "gated-attention": GATED | EPSILON}
    fixed = {"gated-delta-net": DELTA | EPSILON, "gated-attention": GATED | EPSILON | {"rotated_share": 0.0}}
    large = {"short-conv": {"biases": False}, "rotary-attention": HYBRIDS["lfm2"]["mixer_options"]["rotary-attention"]}
    large["rotary-attention"] = large["rotary-attention"] | {"d_head": 32}
    for name, options, message in [
        ("granite", {"mixer_options": wide}, "expand is 1; expected 2, all that llama.cpp reads"),
        (
            "granite",
            {"mixer": ["mamba2", "mamba2"], "mixer_options": {"mamba2": MAMBA2}},
            "mixer is .*; expected attention in a block, without",
        ),
        ("qwen3.5", {"mixer_options": apart}, "d_v / n_heads is 16; expected d_qk / n_qk_heads = 8, as in llama.cpp"),
        ("qwen3.5", {"mixer_options": fixed}, "rotated_share is 0.0; expected more than 0"),
        ("lfm2", {"mixer_options": large}, "d_head is 32; expected d_model / n_heads = 16"),
        ("rwkv7", {"mixer_options": {"rwkv7": {"n_heads": 4}}}, "d_model / n_heads is 16; expected a multiple of 32"),
        ("rwkv7", {"tie_embeddings": True}, "tie_embeddings is True; expected False"),
    ]:
        monkeypatch.setitem(MODELS, "changed", MODELS[name] | options)
        with pytest.raises(ValueError, match=message):
            to_gguf(made("changed", tokenizer), tmp_path / "model.gguf")
    for encoder in (None, Vocabulary(["<eos>", "<unk>"])):
        with pytest.raises(ValueError, match=r"the tokenizer is .*; expected byte pairs"):
            to_gguf(made("mamba", tokenizer)._replace(tokenizer=encoder), tmp_path / "model.gguf")
    assert read_tokenizer({"tokenizer.ggml.model": "none"}, "model.gguf") is None
    assert list(tmp_path.iterdir()) == []
