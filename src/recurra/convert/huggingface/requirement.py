"""Everything in this package needs transformers. Imported first, this says what to install if it is missing."""

from importlib.util import find_spec

from recurra.checks import sentence

if find_spec("transformers") is None:
    _MESSAGE = sentence("transformers", "not installed", "for recurra.convert.huggingface", "pip install 'recurra[hf]'")
    raise ImportError(_MESSAGE, name="transformers")
