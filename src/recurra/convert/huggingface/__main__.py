"""`python -m recurra.convert.huggingface MODULE [ARGUMENTS]`: run a module's command line with the models registered.

For tools that load models by the Auto classes and import nothing of this package:

    python -m recurra.convert.huggingface lm_eval --model hf --model_args pretrained=FOLDER --tasks TASK
"""

import runpy
import sys

import recurra.convert.huggingface  # noqa: F401 - registers the models


def main() -> None:
    """Run the module that the first word names, with the words after it."""
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        print(__doc__)
        sys.exit(0 if len(sys.argv) > 1 else 2)
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
