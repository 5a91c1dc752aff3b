import json

import pytest

from recurra.training import RunFolder


def test_a_folder_with_a_run_is_not_new(tmp_path):
    folder = RunFolder(tmp_path / "runs" / "one")
    folder.require_new()
    with pytest.raises(FileNotFoundError, match=r"run is .*one, which has no config\.yaml; expected the folder"):
        folder.require_run()
    folder.write_config("experiment: text\n")
    folder.require_run()
    with pytest.raises(FileExistsError, match=r"recurra train --resume .*runs.one.*--run"):
        folder.require_new()


def test_the_summary_is_json(tmp_path):
    folder = RunFolder(tmp_path)
    folder.write_summary({"steps": 3, "gpu": None})
    assert json.loads(folder.summary.read_text()) == {"steps": 3, "gpu": None}
