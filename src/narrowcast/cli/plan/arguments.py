"""What `narrowcast plan` may be told: numbers with units, rates of links, and which options belong together."""

from __future__ import annotations

import re
from dataclasses import dataclass

from narrowcast.cli.shared.failing import refuse

COUNTS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
TIMES = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
MOST_BUCKETS = 10**6
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True)
class Network:
    """The network of a plan on paper. Rates are bits a second."""

    ranks: int
    hosts: int
    rates: list[float]
    local_rate: float | None
    latency_s: float


def parse_amount(
    option: str, text: str, units: dict[str, int] | dict[str, float], example: str, least: float = 0
) -> float:
    """A number with its unit, such as 124M or 50us."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?|\.\d+) ?([a-z]*)", text.strip().replace("_", ""), re.IGNORECASE)
    unit = match[2].lower() if match else ""
    if match is None or unit not in units:
        known = ", ".join(name for name in units if name)
        refuse(f"{option} {text!r}: expected a number and a unit ({known}), such as {example}.")
    value = float(match[1]) * units[unit]
    if not least <= value < float("inf"):
        refuse(f"{option} {text!r}: must be at least {least:g}, and finite. Write, for example, {example}.")
    return value


def parse_rates(option: str, text: str, links: int) -> list[float]:
    """The rates of links, with commas between: one for all, or several of those that there are."""
    from narrowcast.netlab import NetlabError
    from narrowcast.netlab.rates import parse_rate

    try:
        rates = [parse_rate(option, each, least=1) for each in text.split(",")]
    except NetlabError as error:
        refuse(str(error))
    if len(rates) > max(1, links):
        refuse(
            f"{option} {text!r}: has {len(rates)} rates for {links} links. Give one for all, or one for each link that "
            "differs: the slowest decides."
        )
    return rates


def network_on_paper(
    ranks: int | None,
    hosts: int,
    per_host: int | None,
    bandwidth: str | None,
    local_bandwidth: str | None,
    latency: str,
    launched: bool,
) -> Network | None:
    """The network that options describe; None where they describe none and torchrun has `launched` several ranks."""
    delay = parse_amount("--latency", latency, TIMES, "50us or 1ms")
    if launched and ranks is None and bandwidth is None and per_host is None:
        if hosts != 1 or local_bandwidth is not None:
            refuse(
                "--hosts and --local-bandwidth are for a plan on paper; live, hosts are as torchrun has started them."
            )
        return None
    number = count_ranks(ranks, hosts, per_host, bandwidth)
    if local_bandwidth is not None and not 1 < hosts < number:
        refuse("--local-bandwidth: is that between ranks of a host. Say how many hosts there are: --hosts 8.")
    rates = parse_rates("--bandwidth", bandwidth or "", hosts if hosts > 1 else number)
    local = None if local_bandwidth is None else parse_rates("--local-bandwidth", local_bandwidth, links=1)[0]
    return Network(number, hosts, rates, local, delay)


def count_ranks(ranks: int | None, hosts: int, per_host: int | None, bandwidth: str | None) -> int:
    """How many ranks a plan on paper has; refuses what does not fit together."""
    if hosts < 1:
        refuse(f"--hosts {hosts}: must be at least 1. Write, for example, --hosts 8.")
    if per_host is not None:
        if hosts == 1:
            refuse(f"--ranks-per-host {per_host}: of how many hosts? Write, for example, --hosts 8.")
        if per_host < 1:
            refuse(
                f"--ranks-per-host {per_host}: must be at least 1. Write, for example, --hosts 8 --ranks-per-host 8."
            )
        if ranks is not None and ranks != hosts * per_host:
            refuse(
                f"--ranks {ranks}: {hosts} hosts of {per_host} ranks are {hosts * per_host}, by --hosts and "
                "--ranks-per-host. Leave --ranks out."
            )
        ranks = hosts * per_host
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
    if ranks % hosts:
        refuse(f"--hosts {hosts}: {ranks} ranks cannot share them evenly. Hosts have as many ranks each.")
    return ranks


def check_buckets(count: int, itemsize: int, bucket_mb: float) -> None:
    """Refuse more buckets than any model has: a unit is wrong."""
    buckets = count * itemsize / (bucket_mb * 2**20)
    if buckets > MOST_BUCKETS:
        refuse(
            f"--params {count:,}: makes {buckets:,.0f} buckets of {bucket_mb:g} MB, more than {MOST_BUCKETS:,}. Check "
            "the unit of --params (7B), or take a larger --bucket-mb."
        )


def check_options(dtype: str, bucket_mb: float, margin: float) -> None:
    if dtype not in DTYPES:
        refuse(f"--dtype {dtype!r}: is none of {', '.join(DTYPES)}. Write, for example, --dtype bf16.")
    if not 0 < bucket_mb < 1e6:
        refuse(f"--bucket-mb {bucket_mb}: must be more than 0, and in MB. DDP's default is --bucket-mb 25.")
    if not 0 <= margin < 10:
        refuse(f"--margin {margin}: must be 0 or more, as a share of the fastest time. Write 0.1 for 10%.")
