"""What griffe calls for every docstring that it reads: examples become code blocks wherever they stand."""

import re
from typing import Any

import griffe

_EXAMPLE = re.compile(r"(?:^[ ]*>>>.*\n?(?:^(?![ ]*$).*\n?)*)+", flags=re.MULTILINE)


class Examples(griffe.Extension):
    """Fence the lines of an example, from `>>>` to the next empty line."""

    def on_instance(self, *, node: Any, obj: griffe.Object, **kwargs: Any) -> None:
        """Change the docstring of what was just read."""
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)


def fenced(text: str) -> str:
    """Put a fence around each example of a docstring.

    >>> print(fenced("Adds.\\n\\n>>> 1 + 1\\n2"))
    Adds.
    <BLANKLINE>
    ```pycon
    >>> 1 + 1
    2
    ```
    """
    return _EXAMPLE.sub(lambda match: f"```pycon\n{match[0].rstrip()}\n```\n", text).rstrip("\n")
