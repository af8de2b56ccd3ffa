"""The ranks of a network in a box: how they start and end, that nothing of them is left, and errors that help."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
from netlab_run import PINGS, alive, left_by, lines, netlab, networked, python, wait_for, words

from narrowcast.netlab import NetlabError, Network, commands, owners, permission
from narrowcast.netlab.link import parse_delay, parse_links

pytestmark = pytest.mark.timeout(120)

RATE = "200mbit"

# Three processes a rank: the rank, a child, and one that left the session. Each says who it is.
STAY = 'echo rank $$; sleep 60 & echo child $!; setsid sh -c "echo stray \\$\\$; exec sleep 60" & wait'


# -- the ranks ---------------------------------------------------------------------------------------------------------


@networked
def test_ranks_find_what_torchrun_sets() -> None:
    shown = "echo $RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $GROUP_RANK $MASTER_ADDR $GLOO_SOCKET_IFNAME"
    done = netlab("--ranks", "2", "--", "sh", "-c", shown)
    assert sorted(lines(done)) == [f"[{rank}] {rank} 2 0 1 {rank} 10.77.0.1 eth0" for rank in (0, 1)]


@networked
def test_ranks_of_a_host_share_its_address() -> None:
    shown = "echo $RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $GROUP_RANK $GROUP_WORLD_SIZE $NETLAB_ADDRESS"
    done = netlab("--ranks", "4", "--per-host", "2", "--", "sh", "-c", shown)
    meant = [f"[{rank}] {rank} 4 {rank % 2} 2 {rank // 2} 2 10.77.0.{rank // 2 + 1}" for rank in range(4)]
    assert sorted(lines(done)) == meant
    assert "4 ranks, 2 on each host" in done.stderr


def test_hosts_have_as_many_ranks_each() -> None:
    with pytest.raises(NetlabError, match=r"--per-host 3: --ranks 4 is no multiple of it"):
        Network(4, per_host=3)


@networked
def test_a_rank_sees_its_own_interface_alone_and_its_counters_start_at_zero() -> None:
    script = "ls /sys/class/net | xargs echo; cat /sys/class/net/$NETLAB_IFNAME/statistics/?x_bytes | xargs echo"
    assert lines(netlab("-n", "1", "--", "sh", "-c", script)) == ["[0] eth0 lo", "[0] 0 0"]


@networked
def test_the_first_failing_ranks_code_is_netlabs_and_the_others_are_ended() -> None:
    began = time.monotonic()
    script = "[ $RANK = 1 ] && exit 7; sleep 60"
    done = netlab("--ranks", "3", "--grace", "0.3", "--", "sh", "-c", script)
    assert done.returncode == 7
    assert time.monotonic() - began < 10
    assert "rank 1 ended with exit code 7" in done.stderr
    assert "SIGTERM to ranks 0, 2" in done.stderr


@networked
def test_a_rank_that_ignores_sigterm_is_killed() -> None:
    script = "trap '' TERM; [ $RANK = 0 ] && sleep 0.5 && exit 9; sleep 60"
    done = netlab("--ranks", "2", "--grace", "0.3", "--", "sh", "-c", script)
    assert done.returncode == 9
    assert "SIGKILL to rank 1" in done.stderr


@networked
def test_keep_going_lets_the_others_end_by_themselves() -> None:
    script = "[ $RANK = 0 ] && exit 7; sleep 1; echo done"
    done = netlab("--ranks", "2", "--grace", "0", "--keep-going", "--", "sh", "-c", script)
    assert done.returncode == 7
    assert done.stdout == "[1] done\n"


@networked
def test_a_signal_that_ends_a_rank_is_named() -> None:
    done = netlab("--ranks", "1", "--", "sh", "-c", "kill -SEGV $$")
    assert done.returncode == 128 + signal.SIGSEGV
    assert "SIGSEGV" in done.stderr


@networked
def test_only_hides_the_other_ranks_until_they_fail() -> None:
    script = "echo out $RANK; echo err $RANK >&2; exit $1"
    quiet = netlab("--ranks", "2", "--only", "0", "--quiet", "--", "sh", "-c", script, "sh", "0")
    assert (quiet.stdout, quiet.stderr, quiet.returncode) == ("[0] out 0\n", "[0] err 0\n", 0)
    failing = netlab("--ranks", "2", "--only", "0", "--quiet", "--", "sh", "-c", script, "sh", "3")
    assert (failing.stdout, failing.returncode) == ("[0] out 0\n", 3)
    assert sorted(failing.stderr.splitlines()) == ["[0] err 0", "[1] err 1"]


@networked
def test_lines_arrive_as_they_are_printed_and_the_last_without_an_end_too() -> None:
    process = subprocess.Popen(
        words("-n", "1", "-q", "--", *python("import time; print('a'); time.sleep(60)")), stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"[0] a\n"
    process.terminate()
    assert process.wait(20) == 128 + signal.SIGTERM
    assert netlab("-n", "1", "--", "printf", "b").stdout == "[0] b\n"


@networked
def test_two_networks_at_once_do_not_meet() -> None:
    with Network(2) as one, Network(2) as two:
        assert one.addresses == two.addresses
        alike = ["sh", "-c", f"exec {sys.executable} -c '{PINGS}' > /dev/null"]
        for process in [*one.start(alike), *two.start(alike)]:
            assert process.wait(20) == 0
        names = {*one.namespaces, *two.namespaces, one.switch, two.switch}
        assert names <= set(owners.names())
    assert not names & set(owners.names())


# -- nothing is left ---------------------------------------------------------------------------------------------------


def begin(*options: str) -> tuple[subprocess.Popen[str], list[int], list[int]]:
    """A netlab whose ranks stay, the ids of the ranks, and those of all that they started."""
    process = subprocess.Popen(
        words("--ranks", "2", *options, "--", "sh", "-c", STAY),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    shown = [process.stdout.readline().split() for _ in range(6)]
    ranks, others = ([int(pid) for _, who, pid in shown if (who == "rank") is wanted] for wanted in (True, False))
    assert (len(alive(ranks)), len(alive(others))) == (2, 4)
    assert len(left_by(process.pid)) == 3
    return process, ranks, others


@networked
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_a_signal_ends_everything(number: signal.Signals) -> None:
    process, ranks, others = begin("--rate", RATE, "--delay", "1ms")
    process.send_signal(number)
    _, said = process.communicate(timeout=20)
    assert process.returncode == 128 + number
    assert number.name in said
    assert left_by(process.pid) == []
    assert alive(ranks + others) == []


@networked
def test_a_killed_netlab_takes_its_ranks_along_and_the_next_one_removes_the_rest() -> None:
    process, ranks, others = begin("--delay", "1ms", "--delay-by", "line")
    process.kill()
    process.wait(20)
    left = left_by(process.pid)
    assert len(left) == 3
    assert wait_for(lambda: not alive(ranks) and not owners.inhabitants([name for name in left if "switch" in name]))
    following = netlab("--ranks", "1", "--", "true")
    assert following.returncode == 0
    assert f"nl{process.pid}." in following.stderr
    assert left_by(process.pid) == []
    assert alive(others) == []


@networked
def test_an_exception_inside_leaves_nothing() -> None:
    network = Network(2, rate=RATE)
    begun = []

    def fail() -> None:
        with network:
            begun.extend(network.start(["sleep", "60"]))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert not set(network.namespaces) & set(owners.names())
    assert alive([process.pid for process in begun]) == []
    assert len(begun) == 2


@networked
def test_a_set_up_that_fails_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    network = Network(2, rate=RATE)
    monkeypatch.setattr("narrowcast.netlab.shaping.sending", lambda *given: ["qdisc add dev nowhere root tbf"])
    with pytest.raises(NetlabError, match=r"`tc qdisc add dev nowhere root tbf` failed"), network:
        pass
    assert not set(network.namespaces) & set(owners.names())


# -- errors that help --------------------------------------------------------------------------------------------------


# A plain user who can read the checkout, wherever it lies.
READ = ["--inh-caps", "+dac_read_search", "--ambient-caps", "+dac_read_search"]


@pytest.mark.skipif(not shutil.which("setpriv"), reason="setpriv, which drops privileges, is not installed")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give up what root has")
@pytest.mark.parametrize(
    ("drop", "fix"),
    [
        (["--bounding-set", "-sys_admin", "--inh-caps", "-sys_admin"], "docker run --cap-add SYS_ADMIN"),
        (["--reuid", "65534", "--clear-groups", *READ], "sudo"),
    ],
    ids=["root in a container", "a plain user"],
)
def test_without_privileges_it_says_what_is_missing_and_how_to_get_it(drop: list[str], fix: str) -> None:
    command = ["setpriv", *drop, *words("--ranks", "2", "--", "true")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "lacks CAP_SYS_ADMIN" in done.stderr
    assert fix in done.stderr
    assert "Traceback" not in done.stderr


def test_without_iproute2_it_says_which_package_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "PATH", "/nowhere")
    with pytest.raises(NetlabError, match=r"needs the command `ip`.*apt install iproute2"):
        permission.require()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--rate", "1gbs", "--", "true"], "--rate '1gbs': a rate is a number and kbit, mbit, gbit"),
        (["--rate", "1000", "--", "true"], "for example, --rate 1gbit"),
        (["--delay", "1", "--", "true"], "for example, --delay 1ms"),
        (["--ranks", "0", "--", "true"], "--ranks 0: there can be 1 to 64"),
        (["--only", "2", "--", "true"], "--only 2: with --ranks 2, ranks are 0 to 1"),
        (["--delay-by", "magic", "--", "true"], "one of auto, netem, line"),
        (["--json", "/nowhere/run.json", "--", "true"], "cannot write to the folder '/nowhere'"),
        (["--json", "/", "--", "true"], "--json /: is a folder. Name a file in it"),
        (["--", "no-such-command"], "there is no command 'no-such-command'"),
        (["--rnaks", "4", "--", "true"], "--rnaks"),
        (["--ranks", "3", "--rate", "1gbit,2gbit", "--", "true"], "--rate: 2 values for 3 ranks"),
        (["--delay", "1ms,2ms,3ms", "--", "true"], "--delay: 3 values for 2 ranks"),
        (["--rate", "1gbit,", "--", "true"], "--rate '': a rate is a number"),
        (["--rate", "10GB/s", "--", "true"], "--rate '10GB/s': could mean bits or bytes"),
        (["--rate", "10", "--", "true"], "--rate '10': a rate is a number and"),
        (["--rate", "1kbit", "--", "true"], "from 64 Kbit to"),
        (["--rate", "9" * 400 + "gbit", "--", "true"], "from 64 Kbit to"),
        (["--loss", "1", "--", "true"], "for example, --loss 0.1%"),
        (["--loss", "80%", "--", "true"], "50% at the most"),
    ],
)
def test_a_wrong_argument_is_named_with_what_to_write(given: list[str], said: str) -> None:
    done = netlab(*given)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_help_shows_examples() -> None:
    assert "--rate 1gbit --delay 1ms -- python train.py" in netlab("--help").stdout


@pytest.mark.parametrize(
    "rate", ["1gbit", "1gbps", "1Gbit/s", "1000mbit", "1 Gbps", "1gbit/s", "1_000mbps", "1000000000bit"]
)
def test_rates_are_written_as_for_plan(rate: str) -> None:
    (link,) = parse_links(1, rate, None, None)
    assert link.rate == 10**9


def test_units_are_tcs() -> None:
    rates = [link.rate for link in parse_links(3, "1gbit,2.5Gbit/s,100 kbit", None, None)]
    assert rates == [10**9, 25 * 10**8, 10**5]
    assert [parse_delay(text) for text in ("1ms", "200us", "0.5s", "0ms")] == [0.001, 0.0002, 0.5, 0]


@networked
def test_where_links_differ_the_first_line_says_whose_is_whose() -> None:
    done = netlab("--ranks", "3", "--rate", "1gbit,100mbit,1gbit", "--", "true")
    assert done.returncode == 0, done.stderr
    assert "3 ranks, ranks 0, 2: 1 Gbit/s each way; rank 1: 100 Mbit/s each way, TCP" in done.stderr
