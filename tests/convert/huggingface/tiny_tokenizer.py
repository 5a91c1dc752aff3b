"""A tokenizer of as many words as the small models know."""

from tests.convert.huggingface.conftest import VOCABULARY
from transformers import PreTrainedTokenizerFast

from recurra.convert.huggingface.folder import fast_tokenizer
from recurra.data.tokenizers import EOS, UNK, Vocabulary


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Return one whose words are w1, w2 and so on, and whose padding is the end of a line."""
    tokenizer = fast_tokenizer(Vocabulary([EOS, UNK, *(f"w{number}" for number in range(1, VOCABULARY - 1))]))
    tokenizer.pad_token = tokenizer.eos_token
    return tokenizer
