"""The log of a server: a JSON object in each line."""

import json
import logging
import time
from pathlib import Path

LOGGER = "recurra.serving"
_USUAL = frozenset(vars(logging.makeLogRecord({}))) | {"message", "taskName"}


class JsonLines(logging.Formatter):
    """Writes a record as a line of JSON: time, level, message, what the caller added, and an error's traceback."""

    def format(self, record: logging.LogRecord) -> str:
        """Give the line."""
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03}Z",
            "level": record.levelname.lower(),
            "message": record.getMessage(),
        }
        line |= {name: value for name, value in vars(record).items() if name not in _USUAL}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def set_up_log(path: Path | None) -> None:
    """Log to a file, requests included, or problems to the standard error. Raises OSError."""
    handler = logging.StreamHandler() if path is None else logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(JsonLines())
    for name in (LOGGER, "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers[:], logger.propagate = [handler], False
        logger.setLevel(logging.WARNING if path is None or name == "uvicorn" else logging.INFO)
