"""The command line: `narrowcast demo`, `codecs`, `inspect`, `plan`, `quantize`."""

from __future__ import annotations

import typer

from narrowcast.cli import codecs, demo, inspect, plan, quantize

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Quantized PyTorch tensors.")
app.command("demo")(demo.demo)
app.command("codecs")(codecs.codecs)
app.command("inspect")(inspect.inspect)
app.command("plan")(plan.plan)
app.command("quantize")(quantize.quantize)
