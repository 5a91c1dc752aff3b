import os
from collections.abc import Callable
from pathlib import Path

import jaxtyping
import pytest

TEXT = {
    "train": "the cat sat on the mat\n\nthe dog sat\n",
    "valid": "the bird sat\n",
    "test": "a dog on the mat\n",
}


@pytest.fixture(autouse=True)
def user_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache folder, so that no test touches the real one."""
    folder = tmp_path_factory.mktemp("user-cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


@pytest.fixture
def no_type_checker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Switch off a run-time type checker, which would refuse bad arguments before the code under test can."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


@pytest.fixture
def make_corpus(tmp_path: Path) -> Callable[..., Path]:
    """Write a small corpus; keywords replace a split's text (None leaves its file out)."""

    def make(name: str = "corpus", **texts: str | bytes | None) -> Path:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        for split, text in {**TEXT, **texts}.items():
            if text is not None:
                content = text if isinstance(text, bytes) else text.encode()
                (folder / f"{split}.txt").write_bytes(content)
        return folder

    return make


@pytest.fixture
def real_corpus() -> Callable[[str], Path]:
    """The folder of a published corpus, or a skip where it is not on this machine."""
    data = Path(os.environ.get("RECURRA_DATA") or Path(__file__).parents[3] / "shared" / "data")

    def find(name: str) -> Path:
        if not (data / name).is_dir():
            pytest.skip(f"the corpus {name} is not in {data}; set RECURRA_DATA to the folder that holds it")
        return data / name

    return find
