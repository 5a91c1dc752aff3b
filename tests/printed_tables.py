"""What a table says once it is printed into a narrow console, where long cells are folded."""


def printed_columns(printed: str) -> list[str]:
    """The text of each column, with the lines of folded cells joined."""
    lines = [line.replace("┃", "│").split("│")[1:-1] for line in printed.splitlines() if line[:1] in ("┃", "│")]
    return ["".join(part.strip() for part in column) for column in zip(*lines, strict=True)]
