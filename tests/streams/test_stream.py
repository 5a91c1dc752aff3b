import numpy as np
import pytest
import torch
from tests.starting_tokenizers import with_start

from recurra.data.tokenizers import BytePairEncoding
from recurra.models.language_model import LanguageModel, LanguageModelConfig
from recurra.state import tensors
from recurra.streams.sampling import SamplingConfig, sample
from recurra.streams.stream import Stream

from .conftest import VOCABULARY, build

CLOSE = {"rtol": 1e-10, "atol": 1e-11}


def draw_tokens(n: int) -> list[int]:
    return torch.randint(VOCABULARY, (n,)).tolist()


# --- in ---


def test_feeding_is_the_model_however_it_is_cut(any_model):
    model = any_model
    tokens = draw_tokens(23)
    stream = Stream(model)
    for piece in (tokens[:1], tokens[1:12], tokens[12:20]):
        stream.feed(piece)
    logits = [stream.step(token) for token in tokens[20:]]
    expected = model(torch.tensor([tokens]))[0][0, 20:]
    torch.testing.assert_close(torch.stack(logits), expected, **CLOSE)
    torch.testing.assert_close(stream.logits, expected[-1], **CLOSE)
    assert stream.position == 23
    assert not any(tensor.requires_grad for tensor in tensors(stream.state))


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor, lambda x: torch.tensor(x, dtype=torch.uint8)])
def test_tokens_of_every_kind(gateloop, kind):
    tokens = draw_tokens(5)
    assert torch.equal(Stream(gateloop).feed(kind(tokens)), Stream(gateloop).feed(tokens))


def test_a_hook_on_the_model_acts_on_pieces_and_on_single_tokens():
    model, tokens = build("gateloop"), draw_tokens(6)
    model.register_forward_hook(lambda module, given, results: (results[0] / 2, results[1]))
    expected = model(torch.tensor([tokens]))[0][0]
    stream = Stream(model)
    for piece in (slice(0, 5), slice(5, 6)):
        torch.testing.assert_close(stream.feed(tokens[piece]), expected[piece][-1], **CLOSE)


def test_text(gateloop, words):
    stream = Stream(gateloop, words)
    assert torch.equal(stream.feed("the dog\n"), Stream(gateloop).feed(words.encode("the dog\n")))
    assert stream.position == 3
    with pytest.raises(ValueError, match="tokenizer is None"):
        Stream(gateloop).feed("the dog")


def test_a_text_at_the_start_follows_what_its_tokenizer_puts_in_front():
    tokenizer = with_start(BytePairEncoding.train(["the dog saw a cat\n"] * 3, 260))
    model = LanguageModel(LanguageModelConfig(len(tokenizer), None, 1, 8, 8)).eval()
    stream, start = Stream(model, tokenizer), list(tokenizer.start)
    assert stream.encode("").tolist() == []
    stream.feed("the dog")
    stream.feed(" saw")
    tokens = [*start, *tokenizer.encode("the dog").tolist(), *tokenizer.encode(" saw").tolist()]
    assert stream.position == len(tokens)
    expected = Stream(model).feed(tokens)
    torch.testing.assert_close(stream.logits, expected)
    stream.reset()
    torch.testing.assert_close(stream.feed(tokens), expected)  # token ids are read as they are


def test_nothing_leaves_the_stream_where_it_is(gateloop):
    stream = Stream(gateloop)
    for nothing in ([], np.array([], dtype=np.int64)):
        with pytest.raises(ValueError, match="the stream is at its start"):
            stream.feed(nothing)
    logits = stream.feed([3])
    assert torch.equal(stream.feed([]), logits)
    assert stream.position == 1


def test_bad_input(gateloop):
    stream = Stream(gateloop)
    with pytest.raises(ValueError, match=r"tokens is int64 \(1, 2\) on cpu; expected one dimension"):
        stream.feed(torch.tensor([[1, 2]]))
    with pytest.raises(TypeError, match=r"tokens is float32 \(2,\) on cpu; expected integers"):
        stream.feed(torch.tensor([1.0, 2.0]))
    stream.feed([1])
    before = stream.logits
    with pytest.raises(IndexError):
        stream.feed([2, VOCABULARY])
    assert stream.position == 1
    assert torch.equal(stream.logits, before)


def test_a_list_of_texts_is_refused(gateloop, unchecked):
    for wrong in (["a", "b"], None):
        with pytest.raises(TypeError, match=r"tokens is (\['a', 'b'\]|None); expected a text, or token ids$"):
            Stream(gateloop).feed(wrong)


def test_training_mode_is_refused_and_left_as_it_is():
    model = build("gateloop")
    stream = Stream(model)
    model.blocks[0].train()
    with pytest.raises(ValueError, match=r"call model.eval\(\) first"):
        Stream(model)
    model.train()
    with pytest.raises(ValueError, match=r"call model.eval\(\) first"):
        stream.feed([1])
    assert model.training


# --- twins ---


def test_a_fork_goes_its_own_way(model):
    prefix, one_way, other_way = draw_tokens(8), draw_tokens(6), draw_tokens(7)
    stream = Stream(model)
    stream.feed(prefix)
    twin = stream.fork()
    assert twin.mark().stream is stream.mark().stream  # which costs nothing
    stream.feed(one_way)
    twin.feed(other_way)
    for got, tokens in ((stream, prefix + one_way), (twin, prefix + other_way)):
        alone = Stream(model)
        torch.testing.assert_close(got.logits, alone.feed(tokens), **CLOSE)
        assert got.position == alone.position


# --- out ---


def test_generation_is_a_loop_of_choosing_and_reading(model):
    config = SamplingConfig(temperature=0.8, top_p=0.9, repetition_penalty=1.5, repetition_window=5)
    prompt = draw_tokens(7)
    stream = Stream(model)
    stream.feed(prompt)
    got = list(stream.generate(12, sampling=config, seed=4))
    tokens, random = list(prompt), torch.Generator().manual_seed(4)
    for _ in range(12):
        logits = model(torch.tensor([tokens]))[0][0, -1].detach()
        tokens.append(int(sample(logits, config, random, torch.tensor(tokens[-5:]))))
    assert got == tokens[7:]
    assert stream.position == 19
    torch.testing.assert_close(stream.logits, model(torch.tensor([tokens]))[0][0, -1], **CLOSE)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_presence_and_frequency_count_all_tokens_of_one_call(gateloop, temperature):
    """What was read, or generated by another call, does not count; what came more than 64 tokens ago does."""
    config = SamplingConfig(presence_penalty=0.5, frequency_penalty=0.25, temperature=temperature)
    stream = Stream(gateloop)
    stream.feed(draw_tokens(5))
    list(stream.generate(9, sampling=config, seed=1))
    twin, random, counts = stream.fork(), torch.Generator().manual_seed(7), torch.zeros(VOCABULARY)
    for token in stream.generate(80, sampling=config, seed=7):
        logits = twin.logits - 0.25 * counts - 0.5 * (counts > 0)
        assert token == int(sample(logits, SamplingConfig(temperature=temperature), random))
        counts[token] += 1
        twin.step(token)


def test_seeds_and_generators(gateloop):
    stream = Stream(gateloop)
    stream.feed([1])

    def run(seed, n=30):
        return list(stream.fork().generate(n, seed=seed))

    assert run(1) == run(1) == run(torch.Generator().manual_seed(1))
    assert run(1) != run(2)
    random = torch.Generator().manual_seed(1)
    twin = stream.fork()
    assert [*twin.generate(10, seed=random), *twin.generate(20, seed=random)] == run(1)
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    run(1)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_stop_tokens_can_be_a_tensor_and_are_whole_numbers(gateloop, unchecked):
    stream = Stream(gateloop)
    stream.feed([1, 2])
    assert len(list(stream.generate(30, stop_tokens=torch.arange(gateloop.config.vocab_size)))) == 1
    for wrong in (["3"], "3", [1.5], torch.ones(2)):
        with pytest.raises(TypeError, match=r"stop_tokens is .*; expected a collection of whole numbers"):
            next(stream.generate(30, stop_tokens=wrong))


def test_what_cannot_be_generated(gateloop):
    with pytest.raises(ValueError, match="the stream is at its start"):
        Stream(gateloop).generate(3)
    stream = Stream(gateloop)
    stream.feed([1])
    with pytest.raises(ValueError, match="max_tokens is 0"):
        stream.generate(0)
    with pytest.raises(TypeError, match="max_tokens is True, a bool; expected a whole number"):
        stream.generate(True)  # not 2.5, which the checks of types in tests refuse before
    with pytest.raises(ValueError, match="tokenizer is None"):
        stream.generate_text(3)
    classes = Stream(LanguageModel(LanguageModelConfig(6, 51, 1, 8, 8)).eval())
    classes.feed([1])
    with pytest.raises(ValueError, match="reads 6 tokens and predicts 51 classes"):
        classes.generate(3)


def test_generated_text_is_what_its_tokens_decode_to(words, bpe):
    for tokenizer in (words, bpe):
        torch.manual_seed(0)
        model = LanguageModel(LanguageModelConfig(len(tokenizer), None, 1, 8, 8)).eval()
        stream = Stream(model, tokenizer)
        stream.feed("the dog")
        twin = stream.fork()
        tokens = [*stream.recent, *twin.generate(60, seed=2)]
        pieces = list(stream.generate_text(60, seed=2))
        assert "the dog" + "".join(pieces) == tokenizer.decode(tokens)
        assert len(pieces) > 20
        assert "" not in pieces
        with pytest.raises(ValueError, match="texts in a list"):
            stream.generated_text("dog")


def test_what_a_stream_keeps_does_not_keep_its_text_alive(any_model):
    stream = Stream(any_model)
    stream.feed(draw_tokens(40))
    for tensor in (stream.snapshot().stream.logits, *tensors(stream.state)):
        # an empty tensor may share the memory of one vector of 12 float64
        assert tensor.untyped_storage().nbytes() <= (tensor.numel() or 12) * tensor.element_size()


# --- marks ---


def test_a_stream_is_rewound_to_a_mark(any_model):
    stream = Stream(any_model)
    start = stream.mark()
    stream.feed(draw_tokens(7))
    mark, logits = stream.mark(), stream.logits
    expected = stream.feed([1, 2, 3])
    stream.rewind(mark)
    assert stream.mark().stream is mark.stream
    assert torch.equal(stream.logits, logits)
    torch.testing.assert_close(stream.feed([1, 2, 3]), expected, rtol=0, atol=0)
    stream.rewind(start)
    assert (stream.position, stream.state) == (0, None)


def test_a_mark_serves_streams_of_one_model(gateloop, crt):
    stream, twin = Stream(gateloop), Stream(gateloop)
    stream.feed([4, 2])
    twin.rewind(stream.mark())
    assert torch.equal(twin.step(1), stream.step(1))
    with pytest.raises(ValueError, match="mark is a place in a stream of another LanguageModel; expected"):
        Stream(crt).rewind(stream.mark())
    with pytest.raises(TypeError, match=r"mark is an int; expected a mark that stream\.mark\(\) returned"):
        stream.rewind(3)


def test_a_state_goes_on_into_a_call_that_records_gradients(any_model):
    stream = Stream(any_model)
    stream.feed([3, 1, 4, 1, 5])
    stream.feed([2])
    logits, _ = any_model(torch.tensor([[1, 2, 3]]), stream.state)
    logits.sum().backward()
    assert any(p.grad is not None for p in any_model.parameters())
