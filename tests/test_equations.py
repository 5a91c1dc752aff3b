"""docs/equations.md against the code: each equation has a symbol that cites it and a test; citations have one form."""

import ast
import pkgutil
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "equations.md"
PACKAGE = ROOT / "src" / "recurra"

NUMBERS = {
    "GateLoop": ["1", "2", "3a", "3b", *map(str, range(4, 26))],
    "CRT": [str(n) for n in range(1, 15)],
}
NAMES = [
    *(f"CRT {name}" for name in ("Lemma 1", "Lemma 2", "Theorem 3", "Table 1")),
    *(f"GateLoop App. {name}" for name in "ABC"),
    *(f"GateLoop section 2.2: {name}" for name in ("S4D-Lin", "S4D-Inv", "LRU", "RetNet")),
    *(f"notes, {name}" for name in ("RNN", "linear RNN", "layer above", "convolution", "kernel", "running sum")),
    *(f"notes, {name}" for name in ("sequential", "up-sweep", "down-sweep", "operator")),
]
EQUATIONS = [f"{paper} ({number})" for paper, numbers in NUMBERS.items() for number in numbers] + NAMES

NUMBER = r"\((\d+[ab]?)\)"
CITATION = re.compile(rf"\b(GateLoop|CRT|[A-Z]\w+ et al\.) {NUMBER}(?:-{NUMBER})?")
BARE_NUMBER = re.compile(r"(?<!\w)\(\d{1,2}[ab]?\)")
NOTES = re.compile(r"[(;:] ?notes, ([^;:)]+)")
OTHER_FORMS = re.compile(r"\beqs?\. ?\(|\bequations? \(?\d|\bthe notes'", re.IGNORECASE)


class Row(NamedTuple):
    """A line of the page's tables; `reason` is empty for an equation that is computed."""

    equation: str
    symbols: list[str]
    tests: list[str]
    reason: str = ""


def read_rows(page: str) -> list[Row]:
    """Read all tables that have a column "equation"."""
    rows, columns = [], 0
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")] if line.startswith("|") else []
        if not cells:
            columns = 0
        elif cells[0] == "equation":
            columns = len(cells)
        elif columns and set(cells[0]) != {"-"}:
            assert len(cells) == columns, f"{cells[0]} has {len(cells)} cells; expected {columns}"
            code = [re.findall(r"`([^`]+)`", cell) for cell in cells]
            rows.append(Row(cells[0], code[2], code[3]) if columns == 4 else Row(cells[0], [], [], cells[2]))
    return rows


def place(number: str) -> tuple[int, str]:
    """Where an equation stands among those of its paper: 3a is before 3b, and 3 is both."""
    return int(number.rstrip("ab")), number.lstrip("0123456789")


def cited_numbers(text: str) -> Iterator[tuple[str, list[str]]]:
    """Give the paper and the known numbers of every citation in a text."""
    for paper, first, last in CITATION.findall(" ".join(text.split())):
        (low, letter), (high, last_letter) = place(first), place(last or first)
        ends = (low, letter), (high, last_letter or "b")
        yield paper, [number for number in NUMBERS.get(paper, []) if ends[0] <= place(number) <= ends[1]]


def cites(text: str, equation: str) -> bool:
    """Tell whether a text cites an equation, directly or within a range."""
    if match := CITATION.fullmatch(equation):
        return any(paper == match[1] and match[2] in numbers for paper, numbers in cited_numbers(text))
    name = equation.partition(":")[0]
    return re.search(rf"\b{re.escape(name)}\b", " ".join(text.split())) is not None


@cache
def functions_of(path: str) -> set[str]:
    """Name the functions of a file."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def docstrings(source: str) -> Iterator[str]:
    """Give every docstring of a module on one line each, those of attributes too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield " ".join(node.value.value.split())


def wrong_citations(source: str) -> list[str]:
    """Find what is cited in another form than the fixed one, and what the sources do not have."""
    wrong = [match[0] for match in OTHER_FORMS.finditer(source)]
    for docstring in docstrings(source):
        wrong += BARE_NUMBER.findall(CITATION.sub("", docstring))
        wrong += [f"notes, {name}" for name in NOTES.findall(docstring) if f"notes, {name}" not in NAMES]
        for paper, first, last in CITATION.findall(docstring):
            if paper in NUMBERS and not {first, last or first} <= {*NUMBERS[paper], "3"}:
                wrong.append(f"{paper} ({first})" + (f"-({last})" if last else ""))
    return wrong


ROWS = read_rows(PAGE.read_text(encoding="utf-8"))
COMPUTED = [row for row in ROWS if not row.reason]


def test_every_equation_has_one_row():
    equations = [row.equation for row in ROWS]
    assert len(equations) == len(set(equations))
    assert [equation for equation in EQUATIONS if equation not in equations] == []
    numbered = [equation for equation in equations if CITATION.fullmatch(equation)]
    assert [equation for equation in numbered if equation not in EQUATIONS] == []


@pytest.mark.parametrize("row", COMPUTED, ids=lambda row: row.equation)
def test_its_symbols_cite_it(row):
    assert row.symbols
    for name in row.symbols:
        docstring = pkgutil.resolve_name(name).__doc__ or ""
        assert cites(docstring, row.equation), f"the docstring of {name} does not cite {row.equation}"


@pytest.mark.parametrize("row", COMPUTED, ids=lambda row: row.equation)
def test_its_tests_are_there(row):
    assert row.tests
    for test in row.tests:
        path, _, name = test.partition("::")
        assert (ROOT / path).is_file(), f"{row.equation}: no file {path}"
        assert name.startswith("test_")
        assert name in functions_of(path), f"{row.equation}: no test {name} in {path}"


def test_citations_have_one_form():
    wrong = {
        path.relative_to(PACKAGE).as_posix(): wrong_citations(path.read_text("utf-8")) for path in PACKAGE.rglob("*.py")
    }
    assert {path: found for path, found in wrong.items() if found} == {}


@pytest.mark.parametrize(
    ("docstring", "expected"),
    [
        ("GateLoop (17), GateLoop (2)-(3), GateLoop (3a), Gu et al. (9), (notes, linear RNN; notes, up-sweep)", []),
        ("GateLoop eq. (7)-(8)", ["eq. (", "(7)", "(8)"]),
        ("CRT (5) and (11)", ["(11)"]),
        ("GateLoop (26), CRT (12)-(15)", ["GateLoop (26)", "CRT (12)-(15)"]),
        ("the notes' tree (notes, tree)", ["the notes'", "notes, tree"]),
        ("f(2) of shape (B, L), 3 (of 4)", []),
    ],
)
def test_what_is_no_citation(docstring, expected):
    assert wrong_citations(f'def f():\n    """{docstring}"""\n') == expected


@pytest.mark.parametrize(
    ("text", "cited", "not_cited"),
    [
        ("the attention of GateLoop\n    (14)-(21).", "GateLoop (17)", "GateLoop (22)"),
        ("GateLoop (3a)-(5)", "GateLoop (3b)", "CRT (5)"),
        ("GateLoop (3b)-(12)", "GateLoop (5)", "GateLoop (3a)"),
        ("CRT Lemma 21, CRT (5) and (11)", "CRT (5)", "CRT Lemma 2"),
        ("(notes, linear RNN)", "notes, linear RNN", "notes, RNN"),
        ("GateLoop section 2.2", "GateLoop section 2.2: LRU", "GateLoop (2)"),
    ],
)
def test_what_counts_as_a_citation(text, cited, not_cited):
    assert cites(text, cited)
    assert not cites(text, not_cited)
