"""`recurra info`: what is there."""

import pytest

from recurra.cli import info, main


def test_info_names_versions_backends_and_mixers(capsys):
    assert main(["info"]) == 0
    text = capsys.readouterr().out
    for word in ("torch", "reference on cpu", "gateloop", "memory-horizon"):
        assert word in text


@pytest.mark.parametrize(("native", "said"), [(True, "native"), (False, "not native: training.precision auto is")])
def test_info_says_what_the_cpu_has(monkeypatch, native, said):
    monkeypatch.setattr(info, "has_native_bfloat16", lambda device: native)
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "AVX2")
    shown = dict(info._lines())
    assert shown["vector units"] == "AVX2"
    assert shown["bfloat16 on cpu"].startswith(said)
