import json

import pytest
import yaml

from recurra._files.reading import parse_json, parse_yaml, read_json, read_yaml


@pytest.fixture
def written(tmp_path):
    def write(content):
        path = tmp_path / "file"
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return write


def refusal(read, *arguments, **options):
    with pytest.raises(ValueError, match="; expected ") as caught:
        read(*arguments, **options)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 400
    return message


def test_json_is_read_as_it_was_written(written):
    content = {"a": [1, 2.5, None, True, "[{\\"], "é": {"\n": '"'}, "b": "[" * 100, '\\"[': ['"' + "{" * 100]}
    for ascii_only in (True, False):
        assert read_json(written(json.dumps(content, ensure_ascii=ascii_only))) == content


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "not readable as JSON"),
        ("[]", "JSON, but a list; expected a JSON object"),
        ("[" * 1_000_000, "not readable as JSON"),
        ('"\\"' * 300_000, "not readable as JSON"),
        (b"\xff\xfe{\x00}\x00", "not UTF-8 (byte 0 is 0xff); expected text in UTF-8"),
        (b'\xef\xbb\xbf{"a": 1}', "BOM"),
    ],
    ids=range(6),
)
def test_other_json_is_refused_in_a_sentence(written, content, reason):
    path = written(content)
    message = refusal(read_json, path, "the summary", hint="make it again")
    assert message.startswith(f"the summary {path} is ")
    assert reason in message
    assert message.endswith(": make it again")
    if isinstance(content, str):
        assert reason in refusal(parse_json, content, "it")


def test_a_list_is_read_if_asked_for(written):
    assert read_json(written("[1]"), kind=list) == [1]
    assert "expected a JSON list" in refusal(read_json, written("{}"), kind=list)


def test_yaml_is_read_as_by_the_library(written):
    content = "# only\na: 1\nb: [x, 2.5, null, yes]\nc: {d: é}\ne: |\n  text: [\n"
    assert read_yaml(written(content)) == yaml.safe_load(content)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "None"),
        ("- a", "YAML, but a list; expected keys and values in YAML"),
        ("a: [", "not readable as YAML"),
        ("a: 1\na: 1\n", "the key 'a' is there twice"),
        ("1: 2", "the key 1 is an int, not a string"),
        ("? [a]\n: 2", "not readable as YAML"),
        ("a: " + "9" * 5_000, "digits"),
        ("a: 2001-99-99", "month"),
        ("a: !!bool x", "not readable as YAML"),
        ("a: !!python/object:os.system x", "constructor"),
        (b"a: \xe9", "not UTF-8"),
        ("a: &a [1]\nb: *a", "the alias *a, which has to be written out"),
    ],
    ids=range(12),
)
def test_other_yaml_is_refused_in_a_sentence(written, content, reason):
    path = written(content)
    message = refusal(read_yaml, path, "the recipe")
    assert message.startswith(f"the recipe {path} is ")
    assert reason in message


def test_yaml_of_any_kind_can_be_parsed():
    assert parse_yaml("[1, a]", "--key") == [1, "a"]
    assert parse_yaml("1e-3", "--key") == yaml.safe_load("1e-3")
    assert refusal(parse_yaml, "[1", "--key").startswith("--key is not readable as YAML")
