"""What is said where transformers is not installed."""

import importlib
import sys

import pytest


@pytest.mark.parametrize("module", ["recurra.convert.huggingface", "recurra.convert.huggingface.tokenizer"])
def test_without_transformers_the_extra_is_named(monkeypatch, module):
    for name in [name for name in sys.modules if name.startswith("recurra.convert.huggingface")]:
        monkeypatch.delitem(sys.modules, name)
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "transformers" else find(name))
    with pytest.raises(ImportError, match=r"transformers is not installed; .*: pip install 'recurra\[hf\]'") as caught:
        importlib.import_module(module)
    assert caught.value.name == "transformers"
