from typing import Any

import pytest

from recurra.files.typed import require_fields

TYPES = {
    "n": int,
    "x": float,
    "maybe": float | None,
    "either": dict[str, dict[str, int | float]],
    "rows": list[list[int]],
    "cells": dict[str, list[int | float | None]] | None,
    "said": bool,
    "free": Any,
    "name": str,
    "open": dict[str, Any],
}
FITS = {
    "n": 3,
    "x": 3,
    "maybe": None,
    "either": {"best": {"loss": 2.5, "step": 1}},
    "rows": [[1], []],
    "cells": {"a": [1, None, 0.5]},
    "said": True,
    "free": [{}],
    "name": "x",
    "open": {"a": "b"},
}


def test_what_fits_passes_and_so_do_other_keys():
    require_fields(FITS | {"other": object()}, TYPES, "file")
    require_fields({}, TYPES, "file")
    require_fields({"x": float("inf")}, TYPES, "file", finite=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n": 3.0}, "n is a float; expected a whole number"),
        ({"n": True}, "n is a bool; expected a whole number"),
        ({"n": None}, "n is None; expected a whole number"),
        ({"x": "3"}, "x is a str; expected a number"),
        ({"x": float("inf")}, "x is inf; expected a finite number"),
        ({"maybe": []}, "maybe is a list; expected a number"),
        ({"either": {"best": {"loss": "2"}}}, "either.best.loss is a str; expected a number"),
        ({"either": {"best": 2}}, "either.best is an int; expected an object"),
        ({"rows": [[1], [1, None]]}, r"rows\[1\]\[1\] is None; expected a whole number"),
        ({"cells": {"a": [1, "x"]}}, r"cells.a\[1\] is a str; expected a number"),
        ({"cells": [1]}, "cells is a list; expected an object"),
        ({"said": 1}, "said is an int; expected true or false"),
        ({"name": 1}, "name is an int; expected a string"),
        ({"open": []}, "open is a list; expected an object"),
    ],
)
def test_what_does_not_fit_is_named(change, message):
    with pytest.raises(ValueError, match=f"^file: {message}$"):
        require_fields(FITS | change, TYPES, "file")
