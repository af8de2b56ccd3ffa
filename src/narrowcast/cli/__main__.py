"""`python -m narrowcast.cli`: the command line, for when the script `narrowcast` is not on the path."""

from narrowcast.cli import app

if __name__ == "__main__":
    app(prog_name="narrowcast")
