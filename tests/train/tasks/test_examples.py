"""The prompts that the explorer offers for a model of text."""

from recurra.data.tokenizers import ByteEncoder, BytePairEncoding, Vocabulary
from recurra.train.tasks.text import example_prompts


def test_prompts_are_of_the_words_that_a_vocabulary_knows():
    known = Vocabulary.from_text(["the company said it was once upon a time\n", "in the beginning \n"])
    assert example_prompts(known) == ["once upon a time", "in the beginning", "the company said"]
    some = Vocabulary(["a", "<eos>", ".", "once", "upon", "time", "dog", "<unk>"])
    assert example_prompts(some) == ["once upon a time", "a", "once"]


def test_prompts_fit_the_texts_that_a_vocabulary_was_made_of():
    assert len(set(example_prompts(ByteEncoder()))) == 3
    code = BytePairEncoding.train(["def main():\n"] * 40, 262)
    assert example_prompts(code)[0] == "def main():"
