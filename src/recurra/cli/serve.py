"""`recurra serve`: an HTTP server of trained language models."""

import os
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path

from recurra.checks import sentence
from recurra.cli.arguments import add_checkpoint, command_parser, split_overrides
from recurra.decoding.linear import DTYPES

_DESCRIPTION = """\
Serve trained runs over HTTP: OpenAI's /v1/completions and /v1/chat/completions, streams by name that last in
/v1/sessions, and the explorer, a page to look into a model. Many streams are written side by side. Sessions are written
to disk after every turn.

Without an API key the server listens on this machine only. RECURRA_API_KEY in the environment, or the lines of
--api-key-file, are the keys."""


def run(words: Sequence[str]) -> int:
    """Serve until a signal comes."""
    own, overrides = split_overrides(words)
    arguments = parser().parse_args(own)
    from recurra.serve.app import serve_runs  # loads FastAPI

    return serve_runs(arguments.runs, settings(arguments), arguments, overrides)


def parser(name: str = "serve", description: str = _DESCRIPTION) -> ArgumentParser:
    """The arguments of a server."""
    made = command_parser(name, description)
    made.add_argument("runs", metavar="RUN", nargs="+", help="folder of a run; its name is the model's name")
    add = made.add_argument
    add("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    add("--port", type=int, default=8000, help="port to listen on; 0 chooses a free one (default: 8000)")
    add("--api-key-file", type=Path, metavar="FILE", help="file with an API key on each line")
    add(
        "--sessions",
        type=Path,
        metavar="FILE",
        help="where sessions are kept (default: sessions.sqlite in the first RUN)",
    )
    add(
        "--weights",
        choices=(*DTYPES, "model"),
        default="float32",
        help="how weights are kept; model runs the model as it is (default: float32)",
    )
    add("--threads", type=int, metavar="N", help="threads of the model (default: as many as cores)")
    add("--max-streams", type=int, default=1024, metavar="N", help="streams at the same time (default: 1024)")
    add("--max-queue", type=int, default=1024, metavar="N", help="requests that wait; more get 429 (default: 1024)")
    add(
        "--max-tokens",
        type=int,
        default=65_536,
        metavar="N",
        help="tokens that a request may bring or ask for (default: 65536)",
    )
    add(
        "--log-file",
        type=Path,
        metavar="FILE",
        help="log requests, a JSON object in each line (default: problems alone, on the standard error)",
    )
    add_checkpoint(made)
    return made


def settings(arguments: Namespace):  # type: ignore[no-untyped-def]
    """The server's limits."""
    from recurra.serve.http import ServeSettings

    keys = [os.environ["RECURRA_API_KEY"]] if os.environ.get("RECURRA_API_KEY") else []
    if arguments.api_key_file is not None:
        keys += _keys_of(arguments.api_key_file)
    return ServeSettings(
        host=arguments.host,
        port=arguments.port,
        api_keys=tuple(keys),
        sessions_file=arguments.sessions or Path(arguments.runs[0]) / "sessions.sqlite",
        max_streams=arguments.max_streams,
        max_queue=arguments.max_queue,
        max_tokens=arguments.max_tokens,
    )


def _keys_of(path: Path) -> list[str]:
    """Read the keys of a file, one from each line. Raises ValueError if there is none, or a line has blanks inside."""
    keys = [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not keys:
        raise ValueError(sentence("--api-key-file", f"{path}, which has no key", "a file with an API key on each line"))
    if any(len(key.split()) > 1 for key in keys):
        got = f"{path}, with a line that has blanks inside"
        raise ValueError(sentence("--api-key-file", got, "an API key on each line, and nothing beside it"))
    return keys
