"""Continue a text, taking the likeliest token each time: python THIS.py "the text so far".

It stands beside the .onnx file of its own name, and needs the packages onnxruntime and tokenizers.
"""

import json
import sys
from hashlib import sha256
from pathlib import Path

import numpy as np
import onnxruntime
from tokenizers import Tokenizer

_N_TOKENS = 20
_SEAL = b"rR\n\x0erecurra.sha256\x12@"
"""What stands before the digest of all that comes before it, at the end of the file."""

if __name__ == "__main__":
    if len(sys.argv) != 2 or not sys.argv[1]:
        sys.exit(f'usage: python {sys.argv[0]} "the text so far"')
    path = Path(__file__).with_suffix(".onnx")
    content = path.read_bytes()
    seal = _SEAL + sha256(content[: -len(_SEAL) - 64]).hexdigest().encode()
    if not content.endswith(seal):
        sys.exit(f"{path} is damaged; expected the file as it was exported")
    session = onnxruntime.InferenceSession(content)
    metadata = session.get_modelmeta().custom_metadata_map
    tokenizer = Tokenizer.from_str(metadata["recurra.tokenizer"])
    tensors = json.loads(metadata["recurra.state"])
    state = {f"state.{tensor['name']}": np.zeros((1, *tensor["shape"]), np.float32) for tensor in tensors}

    tokens = tokenizer.encode(sys.argv[1]).ids  # any number of them, at least one
    if not tokens:
        sys.exit(f"the text is {sys.argv[1]!r}, without a token; expected at least one")
    generated: list[int] = []
    for _ in range(_N_TOKENS):
        logits, *last = session.run(None, {"tokens": np.array([tokens], np.int64), **state})
        state = dict(zip(state, last))
        tokens = [int(logits[0, -1].argmax())]
        generated += tokens
    print(tokenizer.decode(generated))
