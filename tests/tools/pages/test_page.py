"""What all pages have in common: sections in order, functions, a note, and mistakes that are named."""

from pathlib import Path

import pytest
from tools.pages.figures import Figures
from tools.pages.page import Page, PageError

PROSE = "## 2. Prose\n\nA run#row, 50% of {x}, ||U^T U - I||, **bold**.\n"


@pytest.fixture
def make_page(tmp_path):
    """make_page({"01-a": text}): the page of these sections."""

    def make(sections: dict[str, str]) -> Page:
        folder = tmp_path / "docs" / "results"
        (folder / "sections").mkdir(parents=True, exist_ok=True)
        for name, text in sections.items():
            (folder / "sections" / f"{name}.md.jinja").write_text(text)
        functions, values = {"double": lambda x: 2 * x}, {"record": {"sweeps": [1, 2]}}
        return Page(folder, command="make it", figures=Figures(None), functions=functions, values=values)

    return make


def test_sections_stand_in_order_after_a_note_and_prose_stays_as_it_is(make_page):
    page = make_page(
        {"10-last": "last\n\n", "00-head": "# Results\n", "02-prose": PROSE, "03-empty": "{% if false %}x{% endif %}\n"}
    )
    note, text = page.render().split("\n", 1)
    assert note == "<!-- Built by `make it` from docs/results/: change the sections there, not this page. -->"
    assert text == "# Results\n\n" + PROSE + "\nlast\n"
    assert page.file == page.folder.parent / "results.md"


def test_what_a_template_omits_leaves_no_gap(make_page):
    page = make_page({"01-a": "one\n\n{% if false %}\nx\n{% endif %}\n\n{% for i in [] %}\nx\n{% endfor %}\ntwo"})
    assert page.render().split("\n", 1)[1] == "one\n\ntwo\n"


def test_sections_call_functions_read_values_and_use_filters(make_page):
    text = """{{ double(4) | show(1) }} {{ record.sweeps[1] }}
{{ 'one two' | item }}
{% filter paragraph %}
a
 b
{% endfilter %}
"""
    assert make_page({"01-a": text}).render().splitlines()[1:] == ["8.0 2", "- one two", "a b"]


def test_a_page_is_written_whole_or_not_at_all(make_page):
    page = make_page({"01-a": "good"})
    assert page.write() == [page.file]
    before = page.file.read_text()
    assert before.endswith("good\n")
    with pytest.raises(PageError):
        make_page({"02-b": "{{ nothing }}"}).write()
    assert page.file.read_text() == before


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("one\ntwo {{ nothing }}\nthree", 2, "'nothing' is undefined"),
        ("a\n{% if %}\n", 2, "Expected an expression"),
        ("a\nb {{ x\n", 2, "unexpected end of template"),
        ("\n{{ double(nothing) }}", 2, "'nothing' is undefined"),
        ("\n{{ double() }}", 2, "missing 1 required positional argument: 'x'"),
        ("\n\n{{ 1 / 0 }}", 3, "division by zero"),
        ("\n{% include 'nowhere' %}", 2, "nowhere"),
    ],
)
def test_mistakes_are_reported_with_section_and_line(make_page, text, line, message):
    page = make_page({"01-good": "good", "02-bad": text})
    with pytest.raises(PageError, match=message) as raised:
        page.render()
    assert f"02-bad.md.jinja, line {line}: " in str(raised.value)


@pytest.mark.parametrize(
    "expression",
    [
        "double.__globals__",
        "''.__class__.__mro__",
        "record.__class__.__base__.__subclasses__()",
        "'{0.__class__}'.format(record)",
        "range(10**9) | list",
    ],
)
def test_sections_cannot_reach_into_the_program(make_page, expression):
    with pytest.raises(PageError, match=r"unsafe|Range too big"):
        make_page({"01-a": "{{ " + expression + " }}"}).render()


def test_a_folder_without_sections_is_refused(make_page):
    with pytest.raises(FileNotFoundError, match=r"has no sections/\*.md.jinja"):
        make_page({})


def test_figures_are_files_beside_the_page_or_only_named(tmp_path):
    from matplotlib.figure import Figure

    figures = Figures(tmp_path / "figures", dots_per_inch=50)
    assert figures.show(Figure(figsize=(2, 1)), "one", "One") == "![One](figures/one.png)"
    assert figures.written == [tmp_path / "figures" / "one.png"]
    assert (tmp_path / "figures" / "one.png").read_bytes()[16:24] == bytes([0, 0, 0, 100, 0, 0, 0, 50])  # its size
    nowhere = Figures(None)
    assert nowhere.show(Figure(), "one", "One") == "![One](figures/one.png)"
    assert nowhere.written == []
    assert Path(tmp_path / "figures").is_dir()
