"""A trained language model apart from where it was trained: what all its formats on disk share."""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from recurra.checks import sentence
from recurra.data import BytePairEncoding, TextEncoder, Vocabulary
from recurra.files.reading import parse_json

LARGEST_DIFFERENCE = 1e-5
"""Largest difference of a model's logits after conversion, in float32."""


class PortableModel(NamedTuple):
    """A language model, and whatever else is known about it.

    tokenizer: the run's; None if there is none.
    experiment: the run's whole experiment as plain data; None if the model comes from elsewhere.
    step: the update after which the weights were saved; None likewise.
    """

    model: nn.Module
    tokenizer: TextEncoder | None
    experiment: dict[str, Any] | None = None
    step: int | None = None


def tied_parameters(model: nn.Module) -> dict[str, str]:
    """Map the later names of shared parameters to their first names."""
    first: dict[int, str] = {}
    tied = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        earlier = first.setdefault(id(parameter), name)
        if earlier != name:
            tied[name] = earlier
    return tied


_TOKENIZERS = "a Vocabulary (words) or a BytePairEncoding, the ones that a file of a model can hold"


def tokenizer_to_json(tokenizer: TextEncoder) -> str:
    """Return a tokenizer as text.

    Raises:
        ValueError: it is neither a `Vocabulary` nor a `BytePairEncoding`.
    """
    if not isinstance(tokenizer, (Vocabulary, BytePairEncoding)):
        raise ValueError(sentence("the tokenizer", f"a {type(tokenizer).__name__}", _TOKENIZERS))
    return tokenizer.to_json()


def tokenizer_from_json(text: str, name: str = "the tokenizer") -> TextEncoder:
    """Read what `tokenizer_to_json` returned; `name` is what messages call it.

    Raises:
        ValueError: the text is not a tokenizer.
    """
    is_of_words = "words" in parse_json(text, name)
    return Vocabulary.from_json(text, name) if is_of_words else BytePairEncoding.from_json(text, name)


@torch.inference_mode()
def largest_difference(one: nn.Module, other: nn.Module) -> float:
    """Compare the logits of two language models on tokens drawn at random, over more than two segments.

    Returns:
        the largest absolute difference; NaN where logits are NaN.

    Raises:
        ValueError: their vocabularies differ in size.
    """
    config: Any = one.config
    other_config: Any = other.config
    if config.vocab_size != other_config.vocab_size:
        raise ValueError(f"the models have {config.vocab_size} and {other_config.vocab_size} tokens")
    length = min(512, 3 + 2 * getattr(config, "segment_length", 64))
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(config.vocab_size, (2, length), generator=generator, device="cpu")
    first, second = (_logits(model, tokens) for model in (one, other))
    return float((first - second).abs().max())


def _logits(model: nn.Module, tokens: Tensor) -> Float[Tensor, "B L V"]:
    return model(tokens)[0].double()


def require_equal(one: nn.Module, other: nn.Module, what: str) -> float:
    """Return `largest_difference`.

    Raises:
        ValueError: it is above `LARGEST_DIFFERENCE`, or NaN.
    """
    difference = largest_difference(one, other)
    if not difference <= LARGEST_DIFFERENCE:
        raise ValueError(
            f"{what}: its logits differ from the model's by {difference:.1e}, more than {LARGEST_DIFFERENCE:.0e}"
        )
    return difference
