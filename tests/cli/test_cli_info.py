"""`recurra info`: what is there."""

import re

from recurra.cli import main


def test_info_names_versions_backends_and_mixers(capsys):
    assert main(["info"]) == 0
    text = capsys.readouterr().out
    for word in ("torch", "reference on cpu", "gateloop", "memory-horizon"):
        assert word in text
    assert re.search(r"^triton on cpu +no: Triton", text, re.MULTILINE)
