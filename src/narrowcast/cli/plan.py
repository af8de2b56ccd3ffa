"""`narrowcast plan`: the best codec for gradients, on the network of this run or on one that is described.

Live, under torchrun, the ranks measure the link and the codecs. On paper, with --ranks and --bandwidth, the codecs are
measured on this machine and the times on the link are calculated.
"""

from __future__ import annotations

import json
import os
import re
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from narrowcast.cli.shared.failing import refuse
from narrowcast.cli.shared.launched import rank, world
from narrowcast.cli.shared.specs import split_specs

if TYPE_CHECKING:
    import torch

    from narrowcast.distributed.planning.planner import Plan

COUNTS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
RATES = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9, "tbit": 10**12}
TIMES = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def plan(
    params: Annotated[str, typer.Option(help="Parameters of the model, such as 124M or 7B.")],
    ranks: Annotated[int | None, typer.Option(help="On paper: the number of ranks.")] = None,
    bandwidth: Annotated[str | None, typer.Option(help="On paper: each rank's bandwidth, such as 10gbit.")] = None,
    hosts: Annotated[int, typer.Option(help="On paper: hosts that share the ranks; --bandwidth is then a host's.")] = 1,
    local_bandwidth: Annotated[
        str | None, typer.Option(help="On paper: between ranks of a host, such as 400gbit.")
    ] = None,
    latency: Annotated[str, typer.Option(help="On paper: the latency of the network, one way.")] = "50us",
    dtype: Annotated[str, typer.Option(help="The dtype of the gradients: fp32, bf16 or fp16.")] = "fp32",
    bucket_mb: Annotated[float, typer.Option(help="DDP's bucket_cap_mb.")] = 25.0,
    codecs: Annotated[str | None, typer.Option(help="The codecs to consider, separated by commas.")] = None,
    error_feedback: Annotated[bool, typer.Option(help="Include its time, and consider int6 and int4.")] = True,
    margin: Annotated[float, typer.Option(help="How much slower than the fastest codec the chosen one may be.")] = 0.1,
    device: Annotated[str, typer.Option(help="Where the gradients are: cpu (gloo) or cuda (NCCL).")] = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Predict the time of a step's all_reduce with every codec, and choose one, as codec="auto" does.

    Live: torchrun --nproc-per-node 4 --no-python narrowcast plan --params 124M

    On paper: narrowcast plan --params 124M --ranks 8 --bandwidth 1gbit

    Hosts of several ranks: narrowcast plan --params 7B --ranks 64 --hosts 8 --bandwidth 10gbit --device cuda
    """
    count = int(_parse_amount("--params", params, COUNTS, "124M or 7B", least=1))
    delay = _parse_amount("--latency", latency, TIMES, "50us or 1ms")
    rate = None if bandwidth is None else _parse_amount("--bandwidth", bandwidth, RATES, "100mbit or 10gbit", least=1)
    local = (
        None if local_bandwidth is None else _parse_amount("--local-bandwidth", local_bandwidth, RATES, "400gbit", 1)
    )
    _check_options(dtype, bucket_mb, margin, device)
    live = ranks is None and rate is None and world() > 1
    if not live:
        _check_paper(ranks, bandwidth)
        _check_hosts(ranks or 0, hosts, local_bandwidth)
    elif hosts != 1 or local_bandwidth is not None:
        refuse("--hosts and --local-bandwidth are for a plan on paper; live, hosts are as torchrun has started them.")

    import torch

    from narrowcast.distributed.planning import planner as planning

    if device == "cuda" and not torch.cuda.is_available():
        refuse("--device cuda: torch finds no GPU, and codecs are measured where they run. Use --device cpu.")
    kind = getattr(torch, DTYPES[dtype])
    feedback = None if error_feedback else False
    given = planning.candidates_for(kind, feedback) if codecs is None else tuple(split_specs(codecs))
    buckets = planning.buckets_of(count, kind, bucket_mb)
    options = {"dtype": kind, "error_feedback": feedback, "margin": margin}
    if live:
        result = _plan_live(buckets, device, given, options)
    else:
        places = (ranks or 0) // hosts if hosts > 1 else 1
        link = {"latency_s": delay, "device": device, "places": places, "local_bits_per_s": local}
        result = _plan_on_paper(buckets, ranks or 0, hosts, rate or 0.0, link, given, options)
    if rank() == 0:
        if as_json:
            print(json.dumps({**result.as_dict(), "params": count, "live": live}))
        else:
            _show(result, count, live, dtype, torch.device(device))


# -- arguments --------------------------------------------------------------------------------------------------------


def _parse_amount(
    option: str, text: str, units: dict[str, int] | dict[str, float], example: str, least: float = 0
) -> float:
    """A number with its unit, such as 124M, 50us or 10gbit."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?|\.\d+) ?([a-z]*?)(?:/s)?", text.strip().replace("_", ""), re.IGNORECASE)
    unit = match[2].lower() if match else ""
    if match is None or unit not in units:
        known = ", ".join(name for name in units if name)
        refuse(f"{option} {text!r}: expected a number and a unit ({known}), such as {example}.")
    value = float(match[1]) * units[unit]
    if value < least:
        refuse(f"{option} {text!r}: must be at least {least:g}. Write, for example, {example}.")
    return value


def _check_options(dtype: str, bucket_mb: float, margin: float, device: str) -> None:
    if dtype not in DTYPES:
        refuse(f"--dtype {dtype!r}: is none of {', '.join(DTYPES)}. Write, for example, --dtype bf16.")
    if bucket_mb <= 0:
        refuse(f"--bucket-mb {bucket_mb}: must be more than 0. DDP's default is --bucket-mb 25.")
    if margin < 0:
        refuse(f"--margin {margin}: must be 0 or more, as a share of the fastest time. Write 0.1 for 10%.")
    if device not in ("cpu", "cuda"):
        refuse(f"--device {device!r}: is neither cpu nor cuda.")


def _check_paper(ranks: int | None, bandwidth: str | None) -> None:
    if ranks is None and bandwidth is None:
        refuse(
            "a single process has no network to measure. Start several with `torchrun --nproc-per-node 4 --no-python "
            "narrowcast plan ...`, or plan on paper with --ranks 16 --bandwidth 10gbit."
        )
    if ranks is None or bandwidth is None:
        missing = "--ranks 16" if ranks is None else "--bandwidth 10gbit"
        refuse(f"a plan on paper needs both --ranks and --bandwidth. Add, for example, {missing}.")
    if ranks < 2:
        refuse(f"--ranks {ranks}: must be at least 2. Write, for example, --ranks 16.")


def _check_hosts(ranks: int, hosts: int, local_bandwidth: str | None) -> None:
    if hosts < 1 or ranks % hosts:
        refuse(f"--hosts {hosts}: {ranks} ranks cannot share them evenly. Hosts have as many ranks each.")
    if local_bandwidth is not None and not 1 < hosts < ranks:
        refuse("--local-bandwidth: is that between ranks of a host. Say how many hosts there are: --hosts 8.")


# -- plans ------------------------------------------------------------------------------------------------------------


def _plan_on_paper(
    buckets: list[int],
    ranks: int,
    hosts: int,
    rate: float,
    link: dict[str, Any],
    codecs: tuple[str, ...],
    options: dict[str, Any],
) -> Plan:
    from narrowcast.codecs import codec as as_codec
    from narrowcast.distributed.planning.codec_speed import measure_codecs
    from narrowcast.distributed.planning.link import link_on_paper
    from narrowcast.distributed.planning.planner import decide
    from narrowcast.distributed.planning.prediction import NONE
    from narrowcast.distributed.transport.gloo import EAGER

    together = hosts if 1 < hosts < ranks else ranks
    speeds = measure_codecs([as_codec(name) for name in codecs if name != NONE], link["device"], ranks=together)
    eager = 0 if link["device"] == "cuda" else EAGER
    return decide(buckets, ranks, link_on_paper(rate, **link), speeds, eager=eager, hosts=hosts, **options)


def _plan_live(buckets: list[int], device: str, codecs: tuple[str, ...], options: dict[str, object]) -> Plan:
    import torch
    import torch.distributed as dist

    from narrowcast.distributed.planning import planner

    where = torch.device(device, int(os.environ.get("LOCAL_RANK", "0"))) if device == "cuda" else torch.device("cpu")
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    try:
        return planner.plan(buckets, None, where, candidates=codecs, **options)  # type: ignore[arg-type]
    finally:
        dist.destroy_process_group()


def _show(result: Plan, count: int, live: bool, dtype: str, device: torch.device) -> None:
    import torch

    from narrowcast.codecs import which_kernel
    from narrowcast.distributed.planning.prediction import NONE

    console = Console()
    link, plain = result.link, next(p for p in result.predictions if p.codec == NONE)
    source = "measured" if live else "on paper"
    coded = "on every rank at once" if live else "on this machine, by itself"
    lines = (
        f"{count:,} parameters, {dtype} gradients, {len(result.buckets)} buckets, {result.ranks} ranks{_hosts(result)}",
        f"link, {source}: {_digits(link.bandwidth_bytes_per_s / 1e6)} MB/s, {_digits(link.latency_s * 1e6)} us a trip"
        f"{_messages(link.message_s, device)}{_inside(link.local_bytes_per_s)}",
        f"coding, measured {coded}: {which_kernel('int8', device)}, {torch.get_num_threads()} threads\n",
    )
    console.print("\n".join(lines), highlight=False, markup=False)
    by = "a host" if _hosts(result) else "a rank"
    table = Table("codec", f"MB a step, sent by {by}", "wire, s", "coding, s", "all, s", "speedup", "")
    for p in result.predictions:
        times = (
            f"{p.wire_seconds:.3g}",
            f"{p.coding_seconds:.3g}",
            f"{p.seconds:.3g}",
            f"{plain.seconds / p.seconds:.2f}",
        )
        mark = "chosen" if p.codec == result.chosen else ""
        table.add_row(p.codec, _digits(p.bytes / 1e6), *times, mark, style="bold" if mark else None)
    console.print(table)
    console.print(result.reason, highlight=False, markup=False, soft_wrap=True)


def _hosts(result: Plan) -> str:
    return f" on {result.hosts} hosts" if 1 < result.hosts < result.ranks else ""


def _inside(rate: float | None) -> str:
    return "" if rate is None else f", of each rank while its host's share it; within a host {_digits(rate / 1e6)} MB/s"


def _messages(seconds: float, device: torch.device) -> str:
    """What a plan on paper adds for each message; a measured trip includes it. See `link.MESSAGE_S`."""
    if not seconds:
        return ""
    whose = "NCCL (assumed)" if device.type == "cuda" else "gloo's thread (measured with up to 16 ranks)"
    return f", {_digits(seconds * 1e6)} us a message for {whose}"


def _digits(value: float) -> str:
    """Three digits, without an exponent for large values."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
