import re

import pytest

from tools.pages.benchmarks import tables


@pytest.fixture
def page(render, record) -> str:
    return render(record)


def _row(page: str, table: str, name: str) -> list[str]:
    """The cells of a row behind its name, in the table whose head begins with `table`."""
    lines = page[page.index(f"| {table} |") :].splitlines()
    return next(line for line in lines if line.startswith(f"| {name} |")).strip("| ").split(" | ")[1:]


def test_machine_versions_and_settings_come_from_the_record(page, render, record):
    for said in (
        "2031-02-03",
        "commit 0123456789",
        "`python -m tools.pages benchmarks --longest 12`",
        "A processor, 2 cores",
    ):
        assert said in page
    assert "python 3.11.7, torch 2.13.0" in page
    assert "L = 2^7 to 2^12" in " ".join(page.split())
    record["limits"] = {"seconds": 3.5, "gigabytes": 7.0}
    assert "more than 3.5 s or, with its inputs, 7 GB" in " ".join(render(record).split())


def test_ratios_stand_at_the_lengths_that_were_measured(page):
    assert "| time over the floor's | L = 2^10 |\n" in page
    assert _row(page, "time over the floor's", "floor, ms") == ["1.02"]
    assert _row(page, "time over the floor's", 'mode "scan"') == ["12.0"]
    assert _row(page, "time over the floor's", "square") == ["1,024"]


def test_details_of_a_curve(page):
    assert _row(page, "method", 'mode "chunk"') == ["2.00", "2^9", "L^1.00", "2,048", "2^12", "its cost"]
    assert _row(page, "method", "square")[-2:] == ["2^10; next: about 4.19 s", "its cost"]


@pytest.mark.parametrize(
    ("stop", "said"),
    [
        ({"reason": "memory", "estimate": 8.0}, "2^10; next: about 8.00 GB"),
        ({"reason": "failure", "estimate": -9}, "2^10; then the process exited with -9"),
    ],
)
def test_the_reason_of_an_end_is_said(render, record, sweep, stop, said):
    sweep["stops"]["square"] = stop | {"length": 2**11}
    assert _row(render(record), "method", "square")[-2] == said


def test_sentences_follow_the_numbers(page, render, record, sweep):
    words = " ".join(page.split())
    assert 'Fastest, apart from the floor: mode "scan" at 2^7, mode "chunk" from 2^8 to 2^12.' in words
    assert "Growing faster than L at the end of the curve: square (L^2.00)." in words
    assert "Memory-bound" not in words
    assert 'it is not the fastest mode at L = 2^7, where mode "scan" took 1/1.30 of its time.' in words
    assert "Not measured, because not installed on this machine: jax" in words
    for points in sweep["times"].values():
        points['mode "chunk"']["ratio"], points['mode "chunk"']["median"] = 1.25, 1e-9
    words = " ".join(render(record).split())
    assert 'within 1.5 times its time: mode "chunk" (1.25 at 2^12).' in words
    assert "within 10% of it, at every length" in words


def test_what_is_open_is_said(page, render, record):
    assert "No GPU was available" in page
    assert "0 of 22 points have quartiles" in page
    assert "- The curves of jax." in page
    record["machine"]["cuda"] = "Some card"
    assert "The machine has a GPU (Some card)" in render(record)


def test_a_sweep_without_points_has_no_section(render, record, sweep):
    sweep["times"] = {}
    assert "## A sweep" not in render(record)


def test_lines_of_prose_are_not_long_and_figures_are_named(page):
    assert max(len(line) for line in page.splitlines() if not line.startswith("|")) <= 120
    assert re.findall(r"!\[.*\]\((.*)\)", page) == ["figures/benchmarks-one.png"]


def test_lengths_that_are_no_powers_of_two():
    assert [tables.power(length) for length in (1, 2, 1024, 1000)] == ["2^0", "2^1", "2^10", "1,000"]
