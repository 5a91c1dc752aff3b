"""What a server allows: where it listens, who may ask, and how much."""

from dataclasses import dataclass
from pathlib import Path

from recurra.checks import require, require_at_least, require_positive, sentence

LOCAL_HOSTS = ("127.0.0.1", "::1", "localhost")
"""Addresses that only this machine reaches."""


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """The limits of a server.

    Raises:
        ValueError: a limit is below what can work, or the address is reachable from other machines and there is no key.
    """

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 8000
    """Port to listen on; 0 chooses a free one."""
    api_keys: tuple[str, ...] = ()
    """Keys that requests must bring one of; with none, requests need no key."""
    sessions_file: Path | None = None
    """Where sessions are kept; None keeps them in memory, and they end with the server."""
    max_streams: int = 1024
    """Streams that are read or continued at the same time."""
    max_queue: int = 1024
    """Requests that wait for a place; more are refused with 429."""
    max_sessions: int = 100_000
    """Sessions of one key."""
    max_labels: int = 100
    """Copies of one session that are kept under labels."""
    max_resident_sessions: int = 1024
    """Sessions in memory; the least recently used ones beyond are on disk only. Not without a sessions file."""
    max_tokens: int = 65_536
    """Tokens that a request may ask for or bring, and tokens of a session's transcript that are kept."""
    max_body_bytes: int = 4 * 2**20
    """Size of a request."""
    mark_bytes: int = 128 * 2**20
    """Memory for the states that sessions keep along their transcripts, to fork and rewind quickly."""
    grace_seconds: float = 10.0
    """How long requests may still take after a signal to stop; then they end, and their sessions are written."""
    turn_seconds: float = 600.0
    """How long a request may take, queueing included."""

    def __post_init__(self) -> None:
        names = ("max_streams", "max_sessions", "max_labels", "max_resident_sessions", "max_tokens", "max_body_bytes")
        require_at_least(1, **{name: getattr(self, name) for name in names})
        require_at_least(0, max_queue=self.max_queue, mark_bytes=self.mark_bytes)
        require_positive(turn_seconds=self.turn_seconds)
        require(0 <= self.port < 2**16, "port", self.port, "a number from 0 to 65,535")
        for key in self.api_keys:
            require(
                len(key) >= 8 and key.isascii() and key.isprintable(),
                "an API key",
                "one of other form",
                "at least 8 printable ASCII characters",
            )
        if self.host not in LOCAL_HOSTS and not self.api_keys:
            came = f"{self.host}, which other machines may reach, without an API key"
            raise ValueError(sentence("host", came, "127.0.0.1, or a key", "set RECURRA_API_KEY or --api-key-file"))
