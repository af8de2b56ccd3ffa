"""`narrowcast plan`: the best codec for gradients, on the network of this run or on one that is described.

Live, under torchrun, the ranks measure the link and the codecs. On paper, with --ranks and --bandwidth, the times on
the link are calculated. The codecs are measured on this machine then, or with the name of a GPU derived from what is
known of it. `arguments.py` reads the options, `show.py` prints.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Annotated, Any

import typer

from narrowcast.cli.plan.arguments import (
    COUNTS,
    DTYPES,
    Network,
    check_buckets,
    check_options,
    network_on_paper,
    parse_amount,
)
from narrowcast.cli.shared.failing import refuse
from narrowcast.cli.shared.launched import rank, world
from narrowcast.cli.shared.specs import split_specs

if TYPE_CHECKING:
    from narrowcast.distributed.planning.devices import Device
    from narrowcast.distributed.planning.planner import Plan


def plan(
    params: Annotated[str, typer.Option(help="Parameters of the model, such as 124M or 7B.")],
    ranks: Annotated[int | None, typer.Option(help="On paper: the number of ranks.")] = None,
    bandwidth: Annotated[
        str | None,
        typer.Option(help="On paper: each rank's link, such as 10gbit; with commas where links differ: 10gbit,1gbit."),
    ] = None,
    hosts: Annotated[int, typer.Option(help="On paper: hosts that share the ranks; --bandwidth is then a host's.")] = 1,
    ranks_per_host: Annotated[int | None, typer.Option(help="On paper, in place of --ranks: of each host.")] = None,
    local_bandwidth: Annotated[
        str | None, typer.Option(help="On paper: between ranks of a host, such as 400gbit.")
    ] = None,
    latency: Annotated[str, typer.Option(help="On paper: the latency of the network, one way.")] = "50us",
    dtype: Annotated[str, typer.Option(help="The dtype of the gradients: fp32, bf16 or fp16.")] = "fp32",
    bucket_mb: Annotated[float, typer.Option(help="DDP's bucket_cap_mb.")] = 25.0,
    codecs: Annotated[str | None, typer.Option(help="The codecs to consider, separated by commas.")] = None,
    error_feedback: Annotated[bool, typer.Option(help="Include its time, and consider int6 and int4.")] = True,
    margin: Annotated[float, typer.Option(help="How much slower than the fastest codec the chosen one may be.")] = 0.1,
    device: Annotated[
        str, typer.Option(help="Where gradients are: cpu (gloo), cuda (NCCL), or on paper a GPU's name: H100.")
    ] = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Predict the time of a step's all_reduce with every codec, and choose one, as codec="auto" does.

    Live: torchrun --nproc-per-node 4 --no-python narrowcast plan --params 124M

    On paper: narrowcast plan --params 124M --ranks 8 --bandwidth 1gbit

    A cluster, from a laptop: narrowcast plan --params 7B --hosts 8 --ranks-per-host 8 --bandwidth 10gbit --device H100
    """
    count = int(parse_amount("--params", params, COUNTS, "124M or 7B", least=1))
    check_options(dtype, bucket_mb, margin)
    network = network_on_paper(ranks, hosts, ranks_per_host, bandwidth, local_bandwidth, latency, world() > 1)
    kind, named = _device(device, live=network is None)
    buckets, candidates, options = _gradients(count, dtype, bucket_mb, codecs, error_feedback, margin)
    if network is None:
        result = _plan_live(buckets, kind, candidates, options)
    else:
        result = _plan_on_paper(buckets, network, kind, named, candidates, options)
    if rank() == 0:
        if as_json:
            told = {"params": count, "live": network is None, "device": named.name if named else kind}
            print(json.dumps({**result.as_dict(), **told}))
        else:
            from narrowcast.cli.plan.show import show

            show(result, _head(result, count, dtype, network, kind, named), result.advice)


def _device(name: str, live: bool) -> tuple[str, Device | None]:
    """cpu or cuda, and the GPU that is meant where it is not this machine's."""
    import torch

    from narrowcast.distributed.planning.devices import DEVICES, find_device
    from narrowcast.errors import SpecError

    if name in ("cpu", "cuda"):
        if name == "cuda" and not torch.cuda.is_available():
            refuse(
                "--device cuda: torch finds no GPU, and codecs are measured where they run. Name the GPU to plan for "
                "it on paper (--device H100), or use --device cpu."
            )
        return name, None
    try:
        found = find_device(name)
    except SpecError:
        refuse(f"--device {name!r}: is neither cpu, cuda nor a GPU that is known here: {', '.join(DEVICES)}.")
    if live:
        refuse(f"--device {name}: live, codecs are measured where they run. Use --device cuda, or cpu.")
    return "cuda", found


def _gradients(
    count: int, dtype: str, bucket_mb: float, codecs: str | None, error_feedback: bool, margin: float
) -> tuple[list[int], tuple[str, ...], dict[str, Any]]:
    """The sizes of the buckets, the codecs to consider, and what else decides between them."""
    import torch

    from narrowcast.distributed.planning import planner

    numbers = getattr(torch, DTYPES[dtype])
    feedback = None if error_feedback else False
    candidates = planner.candidates_for(numbers, feedback) if codecs is None else tuple(split_specs(codecs))
    check_buckets(count, numbers.itemsize, bucket_mb)
    options = {"dtype": numbers, "error_feedback": feedback, "margin": margin}
    return planner.buckets_of(count, numbers, bucket_mb), candidates, options


# -- plans ------------------------------------------------------------------------------------------------------------


def _plan_on_paper(
    buckets: list[int],
    network: Network,
    device: str,
    named: Device | None,
    codecs: tuple[str, ...],
    options: dict[str, Any],
) -> Plan:
    from narrowcast.codecs import codec as as_codec
    from narrowcast.distributed.planning.codec_speed import measure_codecs
    from narrowcast.distributed.planning.devices import derived_speeds
    from narrowcast.distributed.planning.link import link_on_paper
    from narrowcast.distributed.planning.planner import decide
    from narrowcast.distributed.planning.prediction import NONE
    from narrowcast.distributed.transport.gloo import EAGER

    ranks, hosts = network.ranks, network.hosts
    together = hosts if 1 < hosts < ranks else ranks
    considered = [as_codec(name) for name in codecs if name != NONE]
    if named is None:
        speeds, local = measure_codecs(considered, device, ranks=together), network.local_rate
    else:
        speeds, local = derived_speeds(considered, named), network.local_rate or 1e9 * named.local_gbit_per_s
    places = ranks // hosts if hosts > 1 else 1
    link = link_on_paper(
        min(network.rates), latency_s=network.latency_s, device=device, places=places, local_bits_per_s=local
    )
    eager = 0 if device == "cuda" else EAGER
    return decide(buckets, ranks, link, speeds, eager=eager, hosts=hosts, **options)


def _plan_live(buckets: list[int], device: str, codecs: tuple[str, ...], options: dict[str, Any]) -> Plan:
    import torch
    import torch.distributed as dist

    from narrowcast.distributed.planning import planner

    where = torch.device(device, int(os.environ.get("LOCAL_RANK", "0"))) if device == "cuda" else torch.device("cpu")
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    try:
        return planner.plan(buckets, None, where, candidates=codecs, **options)
    finally:
        dist.destroy_process_group()


# -- words ------------------------------------------------------------------------------------------------------------


def _head(result: Plan, count: int, dtype: str, network: Network | None, kind: str, named: Device | None) -> list[str]:
    """What the plan was made from."""
    from narrowcast.cli.plan.show import by_hosts, link_line

    live, rates = network is None, network.rates if network else []
    buckets = f"{len(result.buckets)} bucket{'s' if len(result.buckets) > 1 else ''}"
    unequal = f" (the slowest of {len(rates)} links: every rank waits for it)" if len(set(rates)) > 1 else ""
    return [
        f"{count:,} parameters, {dtype} gradients, {buckets}, {result.ranks} ranks{by_hosts(result)}",
        link_line(result, live, kind, unequal),
        _coding(live, kind, named),
    ]


def _coding(live: bool, kind: str, named: Device | None) -> str:
    """Where the speed of codecs comes from."""
    import torch

    from narrowcast.codecs import which_kernel
    from narrowcast.distributed.planning.devices import MEASURED

    if named is not None and named.name == MEASURED:
        return f"coding, measured on an {MEASURED} (bench/results/gpu-h200.md), not here"
    if named is not None:
        return (
            f"coding on {named.name}: not measured, but derived from its published memory bandwidth of "
            f"{named.memory_gb_per_s:,.0f} GB/s and what was measured on an {MEASURED}"
        )
    where = "on every rank at once" if live else "on this machine, by itself"
    return f"coding, measured {where}: {which_kernel('int8', torch.device(kind))}, {torch.get_num_threads()} threads"
