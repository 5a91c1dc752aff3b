"""What packages are made of says the same thing everywhere."""

import re
import sys
from pathlib import Path

import pytest
import yaml
from tools.versions import versions

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
CONDA_NAMES = {"torch": "pytorch", "matplotlib": "matplotlib-base"}
CONDA_ALONE = {"python", "docstring-parser", "typeshed-client"}  # what jsonargparse's extra `signatures` stands for


def _name(requirement: str) -> str:
    return re.split(r"[ \[<>=;]", requirement, maxsplit=1)[0].lower().replace("_", "-")


def test_there_is_one_version():
    found = dict(versions())
    assert len(found) == 5
    assert len(set(found.values())) == 1, found


@pytest.mark.skipif(sys.version_info < (3, 11), reason="needs tomllib, of Python 3.11")
def test_conda_needs_what_the_wheel_needs():
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]  # conda has none: its package has the command line and the figures
    words = [*project["dependencies"], *extras["train"], *extras["plot"]]
    wheel = {CONDA_NAMES.get(_name(word), _name(word)): word for word in words}
    text = re.sub(r"{%.*?%}|{{.*?}}", "", (ROOT / "packaging/conda/meta.yaml").read_text(encoding="utf-8"))
    conda = {_name(word): word for word in yaml.safe_load(text)["requirements"]["run"]}
    assert conda.keys() - CONDA_ALONE == wheel.keys()
    for name, requirement in wheel.items():
        lowest = re.search(r">=([\d.]+)", requirement)
        assert lowest, requirement
        assert conda[name].endswith(f">={lowest[1]}"), name


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_runs_what_is_there(path):
    jobs = yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"]
    commands = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for command in commands:
        for target in re.findall(r"\bmake ([a-z-]+)", command):
            assert f"\n{target}:" in makefile, command
        for module in re.findall(r"-m (tools\.\w+)", command):
            assert (ROOT / f"{module.replace('.', '/')}.py").is_file(), command


def test_only_the_job_that_publishes_may_ask_for_an_identity():
    jobs = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text(encoding="utf-8"))["jobs"]
    asking = [name for name, job in jobs.items() if "id-token" in job.get("permissions", {})]
    assert asking == ["publish"]
    assert jobs["publish"]["needs"] == "build"
    assert not any("run" in step for step in jobs["publish"]["steps"])


@pytest.mark.parametrize(
    "path", sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")), ids=lambda path: path.stem
)
def test_an_issue_form_can_be_read(path):
    form = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert form.get("body") or path.stem == "config"


def test_the_citation_is_of_this_package():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["license"] == "Apache-2.0"
    assert citation["title"].startswith("Recurra")
    assert {"cff-version", "message", "authors", "version"} <= citation.keys()
