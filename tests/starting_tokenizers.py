"""Tokenizers with a token in front of every text, as published models have them."""

from tokenizers import Tokenizer, processors

from recurra.data.tokenizers import BytePairEncoding


def with_start(encoding: BytePairEncoding, token: str = "<bos>") -> BytePairEncoding:
    """Add a special token that a tokenizer puts in front of a text."""
    tokenizer = Tokenizer.from_str(encoding.to_json())
    tokenizer.add_special_tokens([token])
    number = tokenizer.token_to_id(token)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{token} $A", special_tokens=[(token, number)])
    return BytePairEncoding(tokenizer)
