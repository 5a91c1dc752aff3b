"""Where a text begins: the tokens in front of it that published models were trained with, as Gemma's <bos>."""

import numpy as np

from recurra.data.bpe import BytePairEncoding
from recurra.data.corpus import TextEncoder


def encode_first(encoder: TextEncoder, text: str) -> np.ndarray:
    """Turn a text that nothing stands before into tokens: (n,) int64.

    They are those of `encoder.encode`, after the encoder's start unless the text has it. An empty text has none.
    """
    tokens = encoder.encode(text)
    start = start_of(encoder)
    if not len(tokens) or tuple(tokens[: len(start)].tolist()) == start:
        return tokens
    return np.concatenate([np.array(start, dtype=np.int64), tokens])


def first_tokens(encoder: TextEncoder) -> list[int]:
    """Give what a stream begins with that is given nothing to read: the encoder's start, or the end of a line."""
    return list(start_of(encoder)) or encoder.encode("\n").tolist()


def start_of(encoder: TextEncoder) -> tuple[int, ...]:
    """Give the tokens that stand in front of a text; most encoders have none."""
    return encoder.start if isinstance(encoder, BytePairEncoding) else ()
