"""Checks of configuration values: each error names the field, what came and what was expected."""


def require_whole_number(owner: str, field: str, value: object, minimum: int) -> None:
    """Raise TypeError unless `value` is an int, ValueError unless it is at least `minimum`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{owner}.{field} must be a whole number, got {value!r} ({type(value).__name__})")
    if value < minimum:
        raise ValueError(f"{owner}.{field} must be at least {minimum}, got {value}")


def require_choice(owner: str, field: str, value: object, choices: tuple[str, ...]) -> None:
    """Raise ValueError unless `value` is one of `choices`."""
    if value not in choices:
        raise ValueError(f"{owner}.{field} must be one of {', '.join(map(repr, choices))}, got {value!r}")


def require_rank(owner: str, rank: int, world_size: int, batch_size: int) -> None:
    """Raise ValueError unless `rank` is one of `world_size` ranks that can share `batch_size` rows evenly."""
    if world_size < 1 or not 0 <= rank < world_size:
        raise ValueError(f"rank must lie in 0..world_size-1, got rank {rank} of world_size {world_size}")
    if batch_size % world_size:
        raise ValueError(
            f"{owner}.batch_size counts the rows of all ranks together and must be a multiple of world_size "
            f"{world_size}, got {batch_size}"
        )
