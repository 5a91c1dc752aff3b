import pytest
from tests.summaries import HORIZON, TEXT
from tools.pages.page import PageError


def test_runs_are_chosen_by_name_experiment_and_configuration(make_page, make_summary):
    other = {**HORIZON, "model": {"mixer": "lru"}}
    runs = (make_summary("h-b"), make_summary("h-a", other), make_summary("t-a", TEXT))
    page = make_page({"01-a": "x"}, runs)
    names = lambda *words, **more: [run.name for run in page.summaries(*words, **more)]  # noqa: E731
    assert names() == ["h-a", "h-b", "t-a"]
    assert names("h-*") == ["h-a", "h-b"]
    assert names(["t-*", "h-b", "*-b"]) == ["t-a", "h-b"]
    assert names(experiment="text-*") == ["t-a"]
    assert names(where={"model.mixer": "lru"}) == ["h-a"]
    assert names(where={"model.mixer": "lru", "data.modulus": 7}) == []
    assert page.run("t-a").name == "t-a"
    with pytest.raises(ValueError, match="run is 'x'; expected one that has a summary: h-a, h-b, t-a"):
        page.run("x")


def test_tables_numbers_and_figures_come_from_the_summaries(make_page, make_summary, tmp_path):
    text = """{% set runs = summaries("a-*") %}
{% for one in runs %}
{{ one.name }}: {{ one.score("accuracy") | show(2) }}, {{ one.validation.best.loss }}, {{ epochs(one) }}
{% endfor %}
{{ horizon_table(runs) }}
{{ curves_figure(runs, "curves", "All") }}
"""
    page = make_page({"01-a": text}, (make_summary(),))
    lines = page.render().splitlines()[1:]
    assert lines[0] == "a-run: 0.46, 2.0, 4"
    assert lines[3].startswith("| a-run | gateloop, data |")
    assert lines[4] == "![All](figures/curves.png)"
    assert page.figures.written == [tmp_path / "docs" / "figures" / "curves.png"]
    assert page.figures.written[0].stat().st_size > 1000


def test_without_drawing_the_text_is_the_same(make_page, make_summary, tmp_path):
    sections = {"01-a": '{{ curves_figure(summaries(), "curves", "All") }}'}
    whole = make_page(sections, (make_summary(),)).render()
    (tmp_path / "docs" / "figures" / "curves.png").unlink()
    assert make_page(sections, draw=False).render() == whole
    assert not list((tmp_path / "docs" / "figures").iterdir())


MISSING = '{{ missing(["a", "b", "c"], "x-{}-run", "recurra train {}.yaml --run runs/x-{}-run") }}'


def test_missing_runs_are_listed_with_what_to_type(make_page, make_summary):
    runs = [make_summary(f"x-{name}-run") for name in "abc"]
    assert make_page({"01-a": MISSING}).render().splitlines()[1:] == [
        "3 runs are missing here; NAME is one of a, b, c:",
        "",
        "    recurra train NAME.yaml --run runs/x-NAME-run",
        "    recurra eval runs/x-NAME-run",
        "    make report RUNS=runs/x-NAME-run",
    ]
    assert make_page({"01-a": MISSING}, (runs[0], runs[2])).render().splitlines()[1:] == [
        "1 run is missing here:",
        "",
        "    recurra train b.yaml --run runs/x-b-run",
        "    recurra eval runs/x-b-run",
        "    make report RUNS=runs/x-b-run",
    ]
    assert make_page({"01-a": MISSING}, (runs[1],)).render().splitlines()[1:] == [""]


FAMILY = """
common: {data: {segment_length: 5}, model: {n_layer: 2, d_model: 8}}
axes:
  model: {crt: {experiment: text-crt, model: {memory: gru}}, xl: {experiment: text-transformer-xl}}
published: {crt: {test_perplexity: 58.3}, xl: {test_perplexity: 60.0}}
"""


def test_families_are_read_from_the_recipes(make_page, make_summary, tmp_path):
    (tmp_path / "recipes" / "toy").mkdir(parents=True)
    (tmp_path / "recipes" / "toy" / "family.yaml").write_text(FAMILY)
    text = (
        '{{ family_table("toy/family.yaml", summaries()) }}\n{{ family_missing("toy/family.yaml", summaries(), "*") }}'
    )
    lines = make_page({"01-a": text}, (make_summary("mine", TEXT),)).render().splitlines()
    assert lines[3] == "| crt | 58.3 | 61.0 | 7.4 | 4 | 2 | 32-true | 3 | mine |"
    assert lines[4].startswith("| xl | 60.0 | not run |")
    assert lines[5:] == [
        "1 run is missing here:",
        "",
        "    recurra train recipes/toy/family.yaml#xl --data.path FOLDER",
        "    recurra eval runs/toy-xl",
        "    make report RUNS=runs/toy-xl",
    ]


def test_what_was_published_for_a_variant_and_for_a_run(make_page, make_summary, tmp_path):
    (tmp_path / "recipes" / "toy").mkdir(parents=True)
    more = FAMILY.replace("xl: {exp", "other: {model: {memory: none}}, xl: {exp")
    (tmp_path / "recipes" / "toy" / "family.yaml").write_text(more)
    word = '{{ published("toy/family.yaml", ROW).test_perplexity | default("nothing") }}'
    words = ['"xl"', '"other"', "run('mine')", "run('a-run')"]  # the last is of no variant
    sections = {f"{number:02}-a": word.replace("ROW", row) for number, row in enumerate(words)}
    page = make_page(sections, (make_summary("mine", TEXT), make_summary()))
    assert page.render().splitlines()[1:] == ["60.0", "", "nothing", "", "58.3", "", "nothing"]
    with pytest.raises(PageError, match=r"is 'crtt'; expected one of .*: did you mean crt\?"):
        make_page({"01-a": word.replace("ROW", '"crtt"')}).render()


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("\n\n{{ run('x') }}", 3, "run is 'x'; expected one that has a summary: a-run"),
        ("{{ run('a-run').nothing }}", 1, "has no attribute 'nothing'"),
        ("\n{% for x in summaries() %}\n{{ x.validation.first.loss }}\n{% endfor %}", 3, "no attribute 'first'"),
        ("\n{{ horizon_table(summaries('x')) }}", 2, "runs is empty; expected at least one run that has a summary"),
        ("\n{{ horizon_table() }}", 2, "missing 1 required positional argument: 'runs'"),
        ("\n{{ family_table('no/such.yaml', []) }}", 2, "no/such.yaml"),
    ],
)
def test_mistakes_are_reported_with_section_and_line(make_page, make_summary, text, line, message):
    page = make_page({"01-good": "good", "02-bad": text}, (make_summary(),))
    with pytest.raises(PageError, match=message) as raised:
        page.render()
    assert f"02-bad.md.jinja, line {line}: " in str(raised.value)
