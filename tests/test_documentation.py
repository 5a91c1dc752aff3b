"""The pages of documentation say what is there: their snippets run, and the names, files and commands in them exist."""

import ast
import functools
import pkgutil
import re
import shlex
from importlib.util import find_spec
from pathlib import Path

import pytest

from recurra.cli import COMMANDS, main
from recurra.mixers import base as registry
from recurra.train.recipe import find_recipe, read_family, split_variant

ROOT = Path(__file__).parents[1]
PAGES_OF_THE_SITE = sorted(
    path.relative_to(ROOT).as_posix()
    for folder in ("docs/guides", "docs/concepts")
    for path in (ROOT / folder).glob("*.md")
)
SNIPPETS = [
    "README.md",
    "docs/index.md",
    *(page for page in PAGES_OF_THE_SITE if "```python" in (ROOT / page).read_text()),
]
PAGES = [
    "README.md",
    *PAGES_OF_THE_SITE,
    "docs/index.md",
    "docs/start.md",
    "docs/guide.md",
    "docs/finding-your-way.md",
    "docs/serving.md",
    "docs/platforms.md",
    "docs/reference/index.md",
    "src/recurra/pretrained_models/memory-horizon.md",
    "src/recurra/pretrained_models/books.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "docs/decisions.md",
    "docs/lab-log.md",
    "docs/equations.md",
    "docs/explorer.md",
    "docs/scale.md",
    "docs/results.md",
    *sorted(
        path.relative_to(ROOT).as_posix() for path in [*ROOT.glob("docs/results/*.md"), *ROOT.glob("recipes/*/*.md")]
    ),
]
RECIPE_FILE = re.compile(r"\brecipes/[\w/-]+\.yaml(?:#[\w-]+)?")
RUN = "runs/ptb-gateloop"

RECIPE = """
experiment: text
data: {path: corpus, batch_size: 2, segment_length: 4, vocabulary: words}
model: {n_layer: 1, d_model: 8, mixer_options: {d_qk: 8, d_v: 8, n_heads: 8}}
training: {epochs: 1, tensorboard: false, accelerator: cpu, threads: 1}
"""
CORPUS = "the company said sales rose\nthe court said the market rose\n"


def _text(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)


def _blocks(page: str, language: str) -> list[str]:
    return [block for tag, block in FENCED.findall(_text(page)) if tag == language]


@pytest.fixture(autouse=True)
def _threads(set_threads):
    """Runs set the number of threads."""


@pytest.fixture(scope="module")
def workplace(tmp_path_factory) -> Path:
    """A folder with a trained run, as the snippets name it."""
    folder = tmp_path_factory.mktemp("workplace")
    (folder / "corpus").mkdir()
    for split in ("train", "valid", "test"):
        (folder / "corpus" / f"{split}.txt").write_text(CORPUS * 4)
    (folder / "recipe.yaml").write_text(RECIPE.replace("corpus", str(folder / "corpus")))
    assert main(["train", str(folder / "recipe.yaml"), "--run-dir", str(folder / RUN)]) == 0
    return folder


@pytest.mark.parametrize("page", SNIPPETS)
def test_snippets_run(page, workplace, monkeypatch, restored):
    snippets = _blocks(page, "python")
    assert snippets
    monkeypatch.chdir(workplace)
    restored(registry._mixers)  # a page registers a mixer
    if any("transformers" in snippet for snippet in snippets):
        pytest.importorskip("transformers", reason="needs the extra hf: pip install recurra[hf]")
        assert main(["export", "hf", RUN, "FOLDER", "--force"]) == 0
    if any("from trl" in snippet for snippet in snippets):
        pytest.importorskip("trl", reason="needs TRL: pip install trl")
    names: dict[str, object] = {}
    for snippet in snippets:
        exec(compile(snippet, page, "exec"), names)


def test_the_example_of_a_mixer_is_the_real_one():
    (shown,) = (block for block in _blocks("CONTRIBUTING.md", "python") if "class MinGRU(" in block)
    tree = ast.parse(_text("src/recurra/mixers/min_gru.py"))
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node):
            del node.body[0]
    assert ast.unparse(ast.parse(shown)) == ast.unparse(tree)


@pytest.mark.parametrize("page", PAGES)
def test_commands_and_recipes_are_there(page):
    """What the arguments mean is for the tests of the commands."""
    prose = FENCED.sub("", _text(page))
    code = [*_blocks(page, ""), *re.findall(r"`[^`]+`|^ {4}.*$", prose, flags=re.MULTILINE)]
    for command in re.findall(r"^\W*recurra ([a-z]+)\b", "\n".join(code), flags=re.MULTILINE):
        assert command in COMMANDS, f"{page}: recurra {command}"
    named = re.findall(r"\brecurra (?:train|cost) ([\w-]+/[\w-]+(?:#[\w-]+)?)(?!\S)", "\n".join(code))
    for word in [*(name for name in named if not name.startswith("runs/")), *RECIPE_FILE.findall(_text(page))]:
        path, variant = split_variant(word)
        if path.stem != "NAME":
            path = find_recipe(path)
            assert path.is_file(), f"{page}: {word}"
            assert variant in (None, "NAME") or variant in read_family(path).variants, f"{page}: {word}"


@pytest.mark.parametrize("page", SNIPPETS)
def test_commands_in_blocks_begin_with_a_known_word(page):
    lines = [line for block in _blocks(page, "") for line in block.splitlines() if line]
    commands = [words for line in lines if (words := shlex.split(line, comments=True))]
    for program, command, *_ in commands:
        assert program in ("make", "pip", "recurra"), command
        if program == "pip":
            continue
        assert command in COMMANDS if program == "recurra" else f"\n{command}:" in _text("Makefile"), command


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    folder = (ROOT / page).parent
    for target in re.findall(r"\]\(([^)\s]+)\)", _text(page)):
        if not target.startswith(("http", "#")):
            assert (folder / target.partition("#")[0]).exists(), f"{page}: {target}"


@functools.cache
def _names_of_python_files() -> set[str]:
    folders = [path for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")]
    return {path.name for folder in folders for path in folder.rglob("*.py")}


@pytest.mark.parametrize("page", PAGES)
def test_python_files_are_there(page):
    """`scan/operators.py` is below src/recurra, `benchmarks/scan.py` and the like below the root."""
    homes, files = [ROOT, ROOT / "src" / "recurra"], _names_of_python_files()
    for name in re.findall(r"`([\w/]+\.py)`", _text(page)):
        assert any((home / name).exists() for home in homes) or ("/" not in name and name in files), f"{page}: {name}"


def test_names_in_files_are_there():
    """`state.py:detach` is a function, class, method or constant of src/recurra/state.py."""
    for file, name in re.findall(r"`([\w/]+\.py):([\w.]+)`", _text("docs/finding-your-way.md")):
        text = (ROOT / "src" / "recurra" / file).read_text(encoding="utf-8")
        for part in name.split("."):
            assert re.search(rf"(def|class) {part}\b|^{part} = ", text, flags=re.MULTILINE), f"{file}: {part}"


@pytest.mark.parametrize("page", PAGES)
def test_python_names_are_there(page):
    text = re.sub(r"\]\([^)]*\)", "]", _text(page))
    for name in sorted(set(re.findall(r"\brecurra(?!\.(?:json|js|d\.ts)\b)(?:\.[A-Za-z_]\w*)+", text))):
        if "executorch" not in name or find_spec("executorch"):
            pkgutil.resolve_name(name)
