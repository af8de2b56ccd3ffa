"""`python bench/netlab`: a folder that runs. Python then sees its files but no package, so say where that is."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent.parent)]

from netlab.cli import main  # noqa: E402 (the path comes first)

if __name__ == "__main__":
    main()
