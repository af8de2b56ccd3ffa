"""The cables of a network in a box: what was asked for is what TCP and torch get, by clocks and by counters."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from netlab_run import PINGS, lines, netlab, networked, python

from narrowcast.netlab import tcp
from narrowcast.netlab.link import FRAME, PAYLOAD, Link, parse_links

pytestmark = pytest.mark.timeout(120)

RATE = "40mbit"  # little work for the processor, and a burst of milliseconds: a late timer costs no rate
BITS = parse_links(1, RATE, None, None)[0].rate or 0
SENT = 4_000_000  # bytes of each stream: 0.84 s

# Each rank listens, sends `sent` bytes to each rank of `to`, and receives as many from each of `sources`. The clock is
# the machine's, so times of several ranks compare. Prints when it began, and for each stream when how many bytes of it
# had come.
STREAMS = """
import json, os, socket, sys, threading, time
rank, to, sources, sent = int(os.environ["RANK"]), json.loads(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3])
server = socket.create_server(("", 5000))
def call(peer):
    while True:
        try:
            return socket.create_connection((f"rank{peer}", 5000))
        except OSError:
            time.sleep(0.01)
outs = [call(peer) for peer in to.get(str(rank), [])]
ins = [server.accept()[0] for peer in sources.get(str(rank), [])]
streams, began = [[] for source in ins], time.monotonic()
def receive(source, seen):
    buffer, got = bytearray(1 << 20), 0
    while got < sent:
        got += source.recv_into(buffer)
        seen.append((time.monotonic(), got))
threads = [threading.Thread(target=receive, args=pair) for pair in zip(ins, streams)]
threads += [threading.Thread(target=out.sendall, args=[bytes(sent)]) for out in outs]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(json.dumps({"rank": rank, "began": began, "streams": streams}))
"""

REDUCE = """
import torch, torch.distributed as dist
from narrowcast.netlab import read
before = read()
dist.init_process_group("gloo")
x = torch.full((1_000_000,), float(dist.get_rank() + 1))
dist.all_reduce(x)
assert (x == 6).all()
dist.barrier()
print((read() - before).tx_bytes)
dist.destroy_process_group()  # without it torch aborts now and then while the interpreter ends
"""


Arrivals = list[tuple[float, int]]
"""When (seconds since the first byte that any rank sent) how many bytes of a stream had come."""


def streams(
    ranks: int, to: dict[int, list[int]], *options: str, rate: str = RATE, sent: int = SENT
) -> dict[int, list[Arrivals]]:
    """The streams that each rank received."""
    sources = {rank: [peer for peer in to for each in to[peer] if each == rank] for rank in range(ranks)}
    script = python(STREAMS, json.dumps(to), json.dumps(sources), str(sent))
    shown = lines(netlab("--ranks", str(ranks), "--rate", rate, *options, "--", *script))
    found = [json.loads(line.partition(" ")[2]) for line in shown]
    began = min(row["began"] for row in found if row["rank"] in to)
    return {row["rank"]: [[(at - began, got) for at, got in seen] for seen in row["streams"]] for row in found}


def come(link: list[Arrivals], at: float) -> int:
    """Bytes that had come over a link of these streams."""
    return sum(max((got for when, got in stream if when <= at), default=0) for stream in link)


def carried(links: list[list[Arrivals]], bits: int) -> float:
    """The share of its rate that the slowest of these links had in their best tenth of a second in common.

    No machine makes a link look faster than it is for so long, while one that has other things to do makes all of a
    stream late: so the best moment tells what the link can do, and the whole stream what the machine had time for.
    """
    span = 0.1
    last = max(stream[-1][0] for link in links for stream in link)
    starts = [step * span / 4 for step in range(int(4 * (last / span - 1)) + 1)]
    share = max(min(come(link, start + span) - come(link, start) for link in links) for start in starts)
    return share * 8 / span / (bits * PAYLOAD / FRAME)


def held(links: list[list[Arrivals]], bits: int = BITS) -> None:
    """Assert that each of these links has this rate: no byte comes sooner than it allows, and it is reached."""
    cable = Link(bits, delay=0.001)
    packet = cable.frames * FRAME
    for link in links:
        # A bucket that is not empty passes a whole packet, and a queue's share of the rate has a bucket of its own of
        # one packet: it passes that even where the cable's bucket is empty.
        burst = cable.burst + packet + len(link) * 2 * packet
        for at in sorted(at for stream in link for at, _ in stream):
            assert come(link, at) <= burst + at * bits / 8 * PAYLOAD / FRAME
    assert carried(links, bits) >= 0.9


def made_up(share: float, *, stop: float = 0.0) -> Arrivals:
    """A stream at a share of the rate, every millisecond; from 0.3 s on nothing comes for `stop` seconds."""
    sent = [share * BITS / 8 * PAYLOAD / FRAME * at / 1000 for at in range(1, 800)]
    return [(at / 1000 + (stop if at > 300 else 0.0), int(got)) for at, got in enumerate(sent, 1)]


def test_a_wrong_rate_would_be_noticed_and_a_busy_machine_is_not() -> None:
    held([[made_up(1.0)], [made_up(1.0)]])
    held([[made_up(1.0, stop=2.0)]])
    held([[made_up(0.5), made_up(0.5)]])
    wrong = ([[made_up(0.85)]], [[made_up(1.2)]], [[made_up(1.0)], [made_up(0.5)]], [[made_up(0.5), made_up(0.3)]])
    for links in wrong:
        with pytest.raises(AssertionError):
            held(links)


@networked
@pytest.mark.parametrize("options", [(), ("--delay", "1ms")], ids=["rate", "rate and delay"])
def test_a_link_carries_its_rate_both_ways_at_once(options: tuple[str, ...]) -> None:
    received = streams(2, {0: [1], 1: [0]}, *options)
    held([received[0], received[1]])


@networked
def test_senders_to_one_rank_share_its_rate_evenly() -> None:
    received = streams(3, {1: [0, 0], 2: [0]})[0]
    held([received])
    assert one_has_half(received)


@networked
def test_a_sender_shares_its_own_rate_evenly_among_receivers() -> None:
    received = streams(3, {0: [1, 1, 2]})
    held([received[1] + received[2]])
    assert one_has_half(received[1] + received[2])


def one_has_half(received: list[Arrivals]) -> bool:
    """Whether a rank with one stream got as much as one with two, which share the other half."""
    first, _, last = sorted(stream[-1][0] for stream in received)
    return first <= 0.8 * last  # it ends at two thirds; were streams to share, all three would end together


@networked
@pytest.mark.parametrize("by", ["line", "netem"])
def test_a_round_trip_takes_twice_the_delay(by: str) -> None:
    done = netlab("--ranks", "2", "--delay", "5ms", "--delay-by", by, "--", *python(PINGS))
    if by == "netem" and "qdisc kind is unknown" in done.stderr:
        pytest.skip("this kernel has no netem")
    best = float(lines(done)[0].removeprefix("[1] "))
    # The best of 20: a packet never comes early, and at least one is not held up by the scheduler.
    assert 0.010 <= best <= 0.012


@networked
def test_without_limits_packets_are_not_held_up() -> None:
    best = float(lines(netlab("--ranks", "2", "--", *python(PINGS)))[0].removeprefix("[1] "))
    assert best < 0.002


@networked
def test_an_all_reduce_works_and_its_bytes_are_counted(tmp_path: Path) -> None:
    summary = tmp_path / "run.json"
    done = netlab("--ranks", "3", "--json", str(summary), "--", *python(REDUCE))
    least = 2 * 2 / 3 * 4_000_000  # what each rank of a ring of 3 must send
    assert sorted(line.split()[0] for line in lines(done)) == ["[0]", "[1]", "[2]"]
    for line in lines(done):
        assert least <= int(line.split()[1]) <= 1.1 * least
    rows = json.loads(summary.read_text())["per_rank"]
    assert [row["rank"] for row in rows] == [0, 1, 2]
    for row in rows:
        assert least <= row["tx_bytes"] <= 1.1 * least
        assert least <= row["rx_bytes"] <= 1.1 * least
        assert (row["exit_code"], row["tx_dropped"], row["rx_dropped"]) == (0, 0, 0)
    assert sum(row["tx_bytes"] for row in rows) == sum(row["rx_bytes"] for row in rows)
    assert "hostname" not in done.stderr  # torch warns when a rank's address has no name


def test_benchmarks_take_the_tcp_that_the_machine_allows_and_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tcp, "SETTINGS", tmp_path)
    (tmp_path / "tcp_congestion_control").write_text("bbr\n")
    (tmp_path / "tcp_allowed_congestion_control").write_text("reno cubic\n")
    assert tcp.choose() == "cubic"
    assert capsys.readouterr().err == ""
    (tmp_path / "tcp_allowed_congestion_control").write_text("reno bbr\n")
    assert tcp.choose() == "bbr"
    assert "may not use TCP cubic: taking bbr" in capsys.readouterr().err


# -- a rate and a delay for each rank, and loss -----------------------------------------------------------------------


@networked
def test_each_rank_may_have_a_rate_of_its_own(tmp_path: Path) -> None:
    rates = ("80mbit", "80mbit", "20mbit")
    for receiver in (1, 2):
        options = ("--json", str(tmp_path / "x.json"))
        received = streams(3, {0: [receiver]}, *options, rate=",".join(rates), sent=1_500_000)
        held([received[receiver]], int(rates[receiver].removesuffix("mbit")) * 10**6)
    summary = json.loads((tmp_path / "x.json").read_text())
    assert summary["rate_bits_per_second"] == [80_000_000, 80_000_000, 20_000_000]


@networked
def test_a_packet_waits_half_of_both_delays() -> None:
    (shown,) = lines(netlab("--ranks", "2", "--delay", "4ms,30ms", "--", *python(PINGS)))
    assert 0.034 <= float(shown.split()[1]) < 0.060


@networked
def test_loss_drops_its_share_of_packets_and_tcp_still_delivers() -> None:
    script = """
import os, socket, time
if os.environ["RANK"] == "0":
    time.sleep(0.5)
    out = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    for number in range(2000):
        out.sendto(b"x", ("rank1", 5000))
        time.sleep(0.0002)
else:
    own = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    own.bind(("", 5000))
    own.settimeout(5)
    count = 0
    try:
        while True:
            own.recv(10)
            count += 1
            own.settimeout(1)
    except TimeoutError:
        print(count)
"""
    (shown,) = lines(netlab("--ranks", "2", "--loss", "20%", "--", *python(script)))
    assert abs(int(shown.split()[1]) - 1600) < 5 * (2000 * 0.2 * 0.8) ** 0.5  # five deviations of the binomial
    script = python(STREAMS, json.dumps({0: [1]}), json.dumps({1: [0]}), "200000")
    assert len(lines(netlab("--ranks", "2", "--loss", "2%", "--", *script))) == 2


def test_the_folder_of_benchmarks_runs_it_too() -> None:
    script = Path(__file__).parents[2] / "bench" / "netlab"
    done = subprocess.run([sys.executable, script, "--rate", "1GB/s", "--", "true"], capture_output=True, text=True)
    assert (done.returncode, done.stderr[:14]) == (2, "error: --rate ")
