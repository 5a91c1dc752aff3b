import json
import os
import pkgutil
from functools import partial
from typing import Any

import pytest
import yaml

from recurra._files.reading import parse_json, parse_yaml, read_json, read_text, read_yaml, require_fields

# by what reads them: the ending of such files
ENDINGS = {
    "recurra._files.reading:read_text": "",
    "recurra._files.digests:file_sha256": "",
    "recurra._files.weights:read_metadata": "",
    "recurra.convert.portable:load_single_file": ".safetensors",
    "recurra.convert.portable:read_weights": ".bin",
    "recurra.data.tokenizers:BytePairEncoding.load": ".json",
    "recurra.train.checkpoint:load_checkpoint": ".safetensors",
    "recurra.train.metrics:read_metrics": ".jsonl",
    "recurra.train.recipe:load_recipe": ".yaml",
    "recurra.video.reader:VideoFile": ".mp4",
}


@pytest.mark.parametrize("reader", ENDINGS)
@pytest.mark.parametrize(("make", "kind"), [(os.mkfifo, "pipe"), (partial(os.symlink, "/dev/zero"), "device")])
def test_pipes_and_devices_are_refused_before_they_are_opened(tmp_path, reader, make, kind):
    path = tmp_path / f"file{ENDINGS[reader]}"
    make(path)
    with pytest.raises(ValueError, match=rf"^([a-z ]+ )?{path} is a {kind}; expected a file on a disk"):
        pkgutil.resolve_name(reader)(path)


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
        ('{"a": 1, "a": 1}', "the key 'a' is there twice"),
        ('{"a": NaN}', "NaN is no JSON"),
        ('{"a": 1e999}', "the number '1e999' is too large"),
        ('{"a": ' + "9" * 301 + "}", "a number has 301 digits"),
        ('{"a": ' + "[" * 64 + "]" * 64 + "}", "more than 64 levels deep"),
        ("[" * 1_000_000, "more than 64 levels deep"),
        ('{"a":' * 100_000, "more than 64 levels deep"),
        ('"\\"' * 300_000, "not readable as JSON"),
        ('{"' + "k" * 10_000 + '": 1, "' + "k" * 10_000 + '": 1}', "kkk..."),
        (b"\xff\xfe{\x00}\x00", "not UTF-8 (byte 0 is 0xff); expected text in UTF-8"),
        (b'\xef\xbb\xbf{"a": 1}', "BOM"),
    ],
    ids=range(13),
)
def test_other_json_is_refused_in_a_sentence(written, content, reason):
    path = written(content)
    message = refusal(read_json, path, "the summary", hint="make it again")
    assert message.startswith(f"the summary {path} is ")
    assert reason in message
    assert message.endswith(": make it again")
    assert reason in refusal(parse_json, content, "it")


def test_numbers_that_are_not_finite_are_read_if_asked_for(written):
    assert str(read_json(written('{"a": [NaN, 1e999]}'), allow_nan=True)) == "{'a': [nan, inf]}"


def test_a_list_is_read_if_asked_for(written):
    assert read_json(written("[1]"), kind=list) == [1]
    assert "expected a JSON list" in refusal(read_json, written("{}"), kind=list)


def test_a_large_file_is_refused_unread(written, tmp_path):
    message = refusal(read_text, written("x" * 101), most_bytes=100)
    assert message == f"{tmp_path}/file is 101 bytes long; expected at most 100 bytes"
    assert read_text(written("x" * 100), most_bytes=100) == "x" * 100


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
        ("a: &a [*a]", "the alias *a, which has to be written out"),
        ("a: " + "[" * 50_000, "more than 64 levels deep"),
        ("\n".join(" " * n + "a:" for n in range(300)), "more than 64 levels deep"),
        ("a: " + "9" * 5_000, "digits"),
        ("a: 2001-99-99", "month"),
        ("a: !!bool x", "not readable as YAML"),
        ("a: !!python/object:os.system x", "constructor"),
        (b"a: \xe9", "not UTF-8"),
        ("a: 1\n" * 100_000, "500,000 bytes long; expected at most 262,144 bytes"),
    ],
    ids=range(15),
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


# --- plain data ---


TYPES = {
    "n": int,
    "x": float,
    "maybe": float | None,
    "name": str,
    "open": dict[str, Any] | None,
    "named": dict[str, str],
}
FITS = {"n": 3, "x": 3, "maybe": None, "name": "x", "open": {"a": [1]}, "named": {"a": "b"}}


def test_what_fits_passes_and_so_do_other_keys():
    require_fields(FITS | {"other": object()}, TYPES, "file")
    require_fields({}, TYPES, "file")
    require_fields({"x": float("inf")}, TYPES, "file")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n": 3.0}, "n is a float; expected a whole number"),
        ({"n": True}, "n is a bool; expected a whole number"),
        ({"n": None}, "n is None; expected a whole number"),
        ({"x": "3"}, "x is a str; expected a number"),
        ({"maybe": []}, "maybe is a list; expected a number"),
        ({"name": 1}, "name is an int; expected a string"),
        ({"open": []}, "open is a list; expected an object"),
        ({"named": {"a": 1}}, "named.a is an int; expected a string"),
    ],
)
def test_what_does_not_fit_is_named(change, message):
    with pytest.raises(ValueError, match=f"^file: {message}$"):
        require_fields(FITS | change, TYPES, "file")
