"""`narrowcast bench`: the benchmark scripts of the repository. See shared/scripts.py."""

from __future__ import annotations

from collections.abc import Callable

import typer

from narrowcast.cli.shared.failing import Commands
from narrowcast.cli.shared.scripts import FORWARDING, ForwardingCommand, run_script

SCRIPTS = {
    "codec": ("Every codec on the CPU: bytes, error and time, beside a plain copy.", "--quick --codecs int8,int4"),
    "wire": ("all_reduce on links of a known rate, beside gloo's own. Needs root.", "--only slow --out results"),
    "training": ("DDP over slow links, beside competitors: time and loss. Needs root; hours.", "--only speed"),
    "linear": ("Linear layers on encoded weights on the CPU, beside competitors.", "--quick --batches 1,8"),
    "grids": ("Which grid of levels suits which numbers: signal to noise.", "--numel 65536"),
}

app = typer.Typer(cls=Commands, no_args_is_help=True, help="Run a benchmark of the repository.")


def _command(name: str) -> Callable[[typer.Context], None]:
    def run(ctx: typer.Context) -> None:
        arguments = ctx.args[1:] if ctx.args[:1] == ["--"] else ctx.args
        run_script(f"bench {name}", f"bench/{name}.py", arguments)

    return run


for _name, (_measures, _example) in SCRIPTS.items():
    _help = (
        f"{_measures}\n\nIts options: narrowcast bench {_name} -- --help"
        f"\n\nExample: narrowcast bench {_name} {_example}"
    )
    app.command(_name, cls=ForwardingCommand, context_settings=FORWARDING, help=_help)(_command(_name))
