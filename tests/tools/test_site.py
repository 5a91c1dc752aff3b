"""The pages and figures that are made when the site is built."""

import re
from pathlib import Path

import pytest
import yaml
from tools.public_api import PACKAGES
from tools.site.scan_figures import EXAMPLE, draw, watch

ROOT = Path(__file__).parents[2]
PREFIXES = {(0, n): sum(EXAMPLE[: n + 1]) for n in range(len(EXAMPLE))}


@pytest.mark.parametrize(("method", "n_steps", "n_joins"), [("sequential", 7, 7), ("hillis_steele", 3, 17)])
def test_a_scan_is_watched_join_by_join(method, n_steps, n_joins):
    calls = watch(method)
    assert (len(calls), sum(map(len, calls))) == (n_steps, n_joins)


@pytest.mark.parametrize("method", ["sequential", "hillis_steele", "blelloch"])
def test_joins_are_of_neighbours_and_end_in_all_prefixes(method):
    joins = [join for call in watch(method) for join in call]
    assert all(join.earlier[1] + 1 == join.later[0] for join in joins)
    assert all(join.value == sum(EXAMPLE[join.whole[0] : join.whole[1] + 1]) for join in joins)
    assert PREFIXES.items() <= {(0, 0): EXAMPLE[0], **{join.whole: join.value for join in joins}}.items()


@pytest.mark.parametrize("method", ["hillis_steele", "blelloch"])
def test_a_figure_has_every_join_and_the_last_step_in_colour(method):
    calls = watch(method)
    whole, first = draw(method), draw(method, 1)
    assert whole.count("<circle") == len(EXAMPLE) + sum(map(len, calls))
    assert 'class="now' not in whole
    assert first.count('<g class="now') == len(calls[0])
    assert first.count("<line") == 2 * len(calls[0])


def test_examples_of_docstrings_become_code_blocks():
    pytest.importorskip("griffe", reason="needs the extra docs: pip install recurra[docs]")
    from tools.site.docstrings import fenced

    assert fenced("Adds.\n\n>>> 1 + 1\n2\n\nAnd more.") == "Adds.\n\n```pycon\n>>> 1 + 1\n2\n```\n\nAnd more."
    assert fenced("No example.") == "No example."


def test_the_navigation_has_every_public_package():
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    assert re.findall(r"reference/(recurra[\w.]*)\.md", str(nav)) == list(PACKAGES)


def test_a_reference_page_names_every_public_name():
    hooks = pytest.importorskip("tools.site.hooks", reason="needs the extra docs: pip install recurra[docs]")
    page = hooks.reference_page("recurra.ops.scan")
    assert page.startswith("# recurra.ops.scan\n")
    assert "::: recurra.ops.scan.linear_scan\n" in page
    assert "[recurra.state](recurra.state.md)" in hooks.reference_page("recurra")
