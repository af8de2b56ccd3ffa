"""The command line: one module or folder per command, `shared/` for what several use.

A command's module has its arguments and prints its result. It imports torch when the command runs, so that --help is
fast. `shared.failing.Commands` reports what a command raises: one line, and an exit code.
"""

from __future__ import annotations

import sys
from typing import Annotated, Any

try:
    import typer

    from narrowcast.cli import bench, codecs, decode, demo, doctor, encode, generate, inspect, netlab, plan, quantize
    from narrowcast.cli.shared.failing import STOPPED, Commands
except KeyboardInterrupt:  # these imports are the longest part of a short command
    print("error: stopped.", file=sys.stderr)
    sys.exit(130)

CODES = (
    "Exit codes: 0 success; 1 failed while running, or doctor found a fault; 2 wrong arguments or files; 130 Ctrl-C; "
    "141 the reader of the output is gone. bench and netlab end with the code of what they run."
)


class App(typer.Typer):
    """All commands. Ctrl-C while they are put together ends as it does while one runs (`Commands`)."""

    def __call__(self, *args: Any, **extra: Any) -> Any:
        try:
            return super().__call__(*args, **extra)
        except KeyboardInterrupt:
            print("error: stopped.", file=sys.stderr)
            sys.exit(STOPPED)


app = App(cls=Commands, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, epilog=CODES)
app.command("demo")(demo.demo)
app.command("doctor")(doctor.doctor)
app.command("codecs")(codecs.codecs)
app.command("encode")(encode.encode)
app.command("decode")(decode.decode)
app.command("inspect")(inspect.inspect)
app.command("quantize")(quantize.quantize)
app.command("generate")(generate.generate)
app.command("plan")(plan.plan)
app.add_typer(bench.app, name="bench")
app.command("netlab", context_settings=netlab.SETTINGS)(netlab.netlab)


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
