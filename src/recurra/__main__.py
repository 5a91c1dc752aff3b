"""`python -m recurra`: the command line where its script is not on the path."""

import sys

from recurra.cli import main

if __name__ == "__main__":
    sys.exit(main())
