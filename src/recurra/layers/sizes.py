"""Checks of the sizes that mixers take."""


def check_sizes(**sizes: int) -> None:
    """Refuse sizes below 1.

    Raises:
        ValueError: naming the size and its value.
    """
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} is {size}; expected at least 1")


def check_pairs(d_state: int) -> None:
    """Refuse a number of modes that cannot be conjugate pairs.

    Raises:
        ValueError: `d_state` is odd or below 2.
    """
    if d_state < 2 or d_state % 2:
        raise ValueError(f"d_state is {d_state}; expected an even number from 2, as modes come in conjugate pairs")
