"""The command line: `narrowcast demo`, `narrowcast codecs`."""

from __future__ import annotations

import typer

from narrowcast.cli import codecs, demo, inspect

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Quantized PyTorch tensors.")
app.command("demo")(demo.demo)
app.command("codecs")(codecs.codecs)
app.command("inspect")(inspect.inspect)
