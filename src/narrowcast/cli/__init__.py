"""The command line. A command's module names its arguments and prints; torch is imported when one runs, not for --help.

What a command raises is reported by `failing.Commands`: one line, and an exit code.
"""

from __future__ import annotations

from typing import Annotated

import typer

from narrowcast.cli import bench, codecs, demo, doctor, files, inspect, plan, quantize
from narrowcast.cli.failing import Commands

CODES = (
    "Exit codes: 0 done; 1 failed on the way, or doctor found a fault; 2 wrong arguments or files; 130 Ctrl-C; "
    "141 nobody reads what it prints."
)

app = typer.Typer(
    cls=Commands, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, epilog=CODES
)
app.command("demo")(demo.demo)
app.command("doctor")(doctor.doctor)
app.command("codecs")(codecs.codecs)
app.command("encode")(files.encode)
app.command("decode")(files.decode)
app.command("inspect")(inspect.inspect)
app.command("quantize")(quantize.quantize)
app.command("plan")(plan.plan)
app.add_typer(bench.app, name="bench")
bench.register_netlab(app)


def _version(asked: bool) -> None:
    if asked:
        from narrowcast import __version__

        print(__version__)
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Quantized PyTorch tensors: in flight, at rest and in training.

    Example: narrowcast encode weights.npy weights.safetensors --codec int4
    """
