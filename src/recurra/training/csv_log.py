"""The log of a run as a CSV file, whose lines carry checks."""

import csv
import io
import math
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from recurra.checks import sentence
from recurra.files.digests import note_missing_digest
from recurra.files.reading import read_text
from recurra.files.writing import naming, replacing

COLUMNS = (
    "step",
    "epoch",
    "train_loss",
    "valid_loss",
    "valid_accuracy",
    "learning_rate",
    "gradient_norm",
    "tokens",
    "tokens_per_second",
    "frames",
    "frames_per_second",
    "seconds",
    "level",
)
"""Losses are in nats per counted target. Tokens or frames, and seconds, count from the start of the run and exclude
evaluation. The level is that of data that wait until one is learned. An empty cell was not measured."""

CHECK = "check"
"""The last column of the file: the CRC-32 of the check in the line above, a comma and the other cells. So a line that
is changed, lost, repeated or moved shows, and a file that ends early is what a killed process leaves."""

_WHOLE = ("step", "tokens", "frames", "level")
_MOST_BYTES = 2**30
_MEND = "remove the file, and a resumed run logs from its checkpoint on"


class CsvLog:
    """Records in a CSV file, each flushed as soon as it is written.

    Numbers are written in full, so that the file has every measurement to the last bit.

    Args:
        path: the file; it is made if it does not exist.
        last_step: records of later steps are dropped, together with any line that a killed process left unfinished. A
            run that resumes at this step writes them again, so the file has no gaps and no duplicates.

    Raises:
        OSError: the file cannot be read or written.
        ValueError: it is damaged.
    """

    def __init__(self, path: Path, *, last_step: int = 0) -> None:
        records = read_metrics(path) if path.is_file() else []
        header = ",".join((*COLUMNS, CHECK))
        self._path, self._check = path, _crc(header)
        lines = [header, *(self._line(record) for record in records if int(record["step"]) <= last_step)]
        with replacing(path) as file:
            file.write("".join(f"{line}\n" for line in lines).encode())
        self._file = path.open("a", encoding="utf-8", newline="")

    def write(self, record: Mapping[str, Any]) -> None:
        """Add a record. Raises ValueError for a column that is not in `COLUMNS`, and OSError."""
        line = self._line(record)
        with naming(self._path):
            self._file.write(f"{line}\n")
            self._file.flush()

    def close(self) -> None:
        """Close the file. Raises OSError."""
        with naming(self._path):
            self._file.close()

    def _line(self, record: Mapping[str, Any]) -> str:
        text = io.StringIO()
        csv.DictWriter(text, COLUMNS, lineterminator="").writerow(record)
        cells = text.getvalue()
        self._check = _crc(f"{self._check},{cells}")
        return f"{cells},{self._check}"


def read_metrics(path: Path) -> list[dict[str, str]]:
    """Read the records of a metrics file, without a last line that a killed process left unfinished.

    Returns:
        for each record the cells of all `COLUMNS`; empty where nothing was measured.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no log, or a line does not have its check. A log of an older version has no checks: it is read
            with a note in the log.
    """
    lines = read_text(path, most_bytes=_MOST_BYTES, mend=_MEND).split("\n")[:-1]
    names = lines[0].split(",") if lines else []
    checked = names[-1:] == [CHECK]
    columns = names[:-1] if checked else names
    if "step" not in columns or len(set(columns)) < len(columns) or not set(columns) <= set(COLUMNS):
        raise ValueError(sentence(f"the header of {path}", repr(",".join(names)[:200]), ",".join(COLUMNS), _MEND))
    if not checked:
        note_missing_digest(path)
    records, check = [], _crc(lines[0])
    for number, line in enumerate(lines[1:], 2):
        where, cells = f"{path}:{number}", line.split(",")
        if checked:
            check = _crc(f"{check},{','.join(cells[:-1])}")
            if cells.pop() != str(check):
                came = "a damaged line, or not the one that was written after the line above"
                raise ValueError(sentence(where, came, "the line that its check was made of", _MEND))
        if len(cells) != len(columns):
            raise ValueError(
                sentence(where, f"a line of {len(cells)} cells", f"{len(columns)} as in its header", _MEND)
            )
        records.append(dict.fromkeys(COLUMNS, "") | _cells(columns, cells, where))
    return records


def _cells(columns: Sequence[str], cells: Sequence[str], where: str) -> dict[str, str]:
    for name, cell in zip(columns, cells):
        fits = cell.isascii() and cell.isdecimal() and len(cell) < 19 if name in _WHOLE else _is_number(cell)
        if not fits and (cell or name == "step"):
            expected = "a whole number" if name in _WHOLE else "a number or nothing"
            raise ValueError(f"{where}: {sentence(name, repr(cell[:60]), expected, _MEND)}")
    return dict(zip(columns, cells))


def _is_number(cell: str) -> bool:
    try:
        return not math.isinf(float(cell)) or cell in ("inf", "-inf")
    except ValueError:
        return False


def _crc(text: str) -> int:
    return zlib.crc32(text.encode())
