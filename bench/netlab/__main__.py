"""`python bench/netlab`: the command `narrowcast netlab`."""

import sys

from narrowcast.cli import app

if __name__ == "__main__":
    app(["netlab", *sys.argv[1:]])
