"""`python -m tools.pages results` from outside: runs in, summaries and the page out."""

from pathlib import Path

import pytest
from tools.pages.__main__ import main

from recurra.runs.summary import read_summary

PAGE = """
{{ horizon_table(summaries(experiment="memory-horizon")) }}
{{ family_table("toy/family.yaml", summaries(experiment="text-*")) }}
{{ curves_figure(summaries(), "curves", "Curves") }}
{{ span_figure(summaries("h*"), "spans", "Spans") }}
{{ gates_figure(run("horizon"), "gates", "Gates") }}
{{ flops_figure(summaries(experiment="text-*"), "flops", "FLOPs") }}
"""


@pytest.fixture
def there(monkeypatch, scored, tmp_path) -> Path:
    """A page's folder; the working folder has the recipes and runs."""
    monkeypatch.chdir(scored)
    folder = tmp_path / "docs" / "results"
    (folder / "sections").mkdir(parents=True)
    (folder / "sections" / "01-page.md.jinja").write_text("# Page\n")
    return folder


def failure(capsys, *words: str) -> str:
    capsys.readouterr()
    assert main(["results", *words]) == 2
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    assert captured.err.startswith("tools.pages results: ")
    return captured.err


def test_a_run_is_added_and_the_page_is_built(there, capsys):
    assert main(["results", str(there), "--add", "runs/horizon"]) == 0
    summary = there / "summaries" / "horizon.json"
    assert capsys.readouterr().out.split() == [str(summary), str(there.with_suffix(".md"))]
    assert read_summary(summary).finished
    assert there.with_suffix(".md").read_text().endswith("\n# Page\n")


def test_the_page_needs_the_summaries_alone(there, capsys, monkeypatch, scored, tmp_path):
    (there / "sections" / "02-tables.md.jinja").write_text(PAGE)
    assert main(["results", str(there), "--add", "runs/horizon", "--add", "runs/toy-crt"]) == 0
    figures = there.parent / "figures"
    names = ["curves", "spans", "gates", "flops"]
    assert capsys.readouterr().out.split()[2:] == [
        *(str(figures / f"{name}.png") for name in names),
        str(there.with_suffix(".md")),
    ]
    page = there.with_suffix(".md").read_text()
    assert "| horizon | gateloop, data | 3 |" in page
    assert "| xl | 66.9 | not run |" in page
    assert "| crt | 61.0 | " in page
    files = {path: path.read_bytes() for path in [there.with_suffix(".md"), *figures.iterdir()]}
    monkeypatch.chdir(tmp_path)
    assert main(["results", str(there), "--recipes", str(scored / "recipes")]) == 0
    assert {path: path.read_bytes() for path in files} == files


def test_a_corpus_that_moved_is_named_with_the_run(there, tmp_path, scored):
    words = ["--add", "runs/toy-crt", "--data.path", str(scored / "corpus")]
    assert main(["results", str(there), *words]) == 0
    assert read_summary(there / "summaries" / "toy-crt.json").config["data"]["path"] == "corpus"


# --- mistakes ---


def test_values_for_runs_are_refused_without_a_run(there, capsys):
    message = failure(capsys, str(there), "--data.path", "x")
    assert "--data.path is for runs; expected it together with --add RUN" in message
    assert not (there / "summaries").exists()


def test_what_can_be_added_is_beside_a_run_that_is_refused(there, capsys, tmp_path):
    text = failure(capsys, str(there), "--add", str(tmp_path), "runs/horizon")
    assert text.count("expected the folder of a run") == 1
    assert "horizon:" not in text
    assert read_summary(there / "summaries/horizon.json").finished
    assert there.with_suffix(".md").exists()


def test_a_broken_summary_and_a_broken_section_are_named(there, capsys):
    (there / "sections" / "02-bad.md.jinja").write_text("one\n{{ nothing }}\n")
    assert "02-bad.md.jinja, line 2: 'nothing' is undefined" in failure(capsys, str(there))
    (there / "summaries").mkdir()
    (there / "summaries" / "x.json").write_text("{")
    assert "x.json is not readable as JSON" in failure(capsys, str(there))
    assert not there.with_suffix(".md").exists()


def test_a_folder_without_sections_is_refused(capsys, tmp_path):
    assert "which has no sections" in failure(capsys, str(tmp_path))
