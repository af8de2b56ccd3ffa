"""What is counted, and what a profiler sees. Bytes are compared with sizes worked out from the codec alone."""

from __future__ import annotations

import time

import pytest
import torch
from ranks import run
from torch.distributed.device_mesh import init_device_mesh

import narrowcast as nc
from cases import mixed
from narrowcast import distributed as ncd
from narrowcast.distributed.transport.agreement import HEADER_BYTES

CODECS = ("raw", "int8", "int4:block=64", "sign", "nf4")


def of_one(op: str) -> ncd.OpStats:
    """The counts of an operation since the last look."""
    found = ncd.stats()[op]
    ncd.reset_stats()
    return found


def counted(rank: int, world: int) -> None:
    header = (world - 1) * HEADER_BYTES
    for spec in CODECS:
        codec = nc.codec(spec)
        for each in (128, 40 * 1280):  # below and above what travels with the header
            numel, row = each * world, codec.row_bytes(each)
            encoded = world * row
            ncd.reset_stats()

            x = torch.ones(numel)
            ncd.all_reduce(x, codec=codec)
            found = of_one("all_reduce")
            assert found.sent_bytes == 2 * (world - 1) * encoded // world + header, (spec, each)
            assert found.plain_bytes == 2 * (world - 1) * 4 * numel // world
            assert found.calls == 1
            assert found.ratio == found.plain_bytes / found.sent_bytes

            ncd.reduce_scatter_tensor(torch.ones(each), x, codec=codec)
            found = of_one("reduce_scatter_tensor")
            assert (found.sent_bytes, found.plain_bytes) == ((world - 1) * row + header, (world - 1) * 4 * each)

            ncd.all_gather_into_tensor(x, torch.ones(each), codec=codec)
            found = of_one("all_gather_into_tensor")
            assert (found.sent_bytes, found.plain_bytes) == ((world - 1) * row + header, (world - 1) * 4 * each)

            ncd.all_to_all_single(torch.ones(numel), x, codec=codec)
            found = of_one("all_to_all_single")
            assert (found.sent_bytes, found.plain_bytes) == ((world - 1) * row + header, (world - 1) * 4 * each)

            if rank < 2:
                work = ncd.isend(x, 1, codec=codec) if rank == 0 else ncd.irecv(x, 0, codec=codec)
                work.wait()  # type: ignore[union-attr]
                found = of_one("isend" if rank == 0 else "irecv")
                sent = codec.row_bytes(numel) if rank == 0 else 0
                assert found.sent_bytes == sent + HEADER_BYTES
                assert found.plain_bytes == (4 * numel if rank == 0 else 0)


@pytest.mark.parametrize("world", [2, 3, 5])
def test_bytes_sent_are_those_of_the_rows_and_headers(world: int) -> None:
    run(world, counted, world)


def uneven(rank: int) -> int:
    ncd.reset_stats()
    ncd.all_reduce(torch.ones(1000), codec="int8")
    return ncd.stats()["all_reduce"].sent_bytes


def test_every_row_of_an_uneven_all_reduce_is_counted_where_it_is_sent() -> None:
    row = nc.codec("int8").row_bytes
    owned = [384, 384, 232]  # 1000 elements in units of 128
    for rank, sent in enumerate(run(3, uneven)):
        others = sum(row(n) for peer, n in enumerate(owned) if peer != rank)
        assert sent == others + 2 * row(owned[rank]) + 2 * HEADER_BYTES


def broadcasts(rank: int) -> list[tuple[int, int]]:
    found = []
    for numel in (1000, 300_000):
        ncd.reset_stats()
        ncd.broadcast(torch.ones(numel), 1, codec="int8")
        total = of_one("broadcast")
        found.append((total.sent_bytes, total.plain_bytes))
    return found


def test_a_large_broadcast_leaves_the_source_once_and_the_others_pass_it_on() -> None:
    small, large = (nc.codec("int8").row_bytes(n) for n in (1000, 300_000))
    found = run(4, broadcasts)
    header = 3 * HEADER_BYTES
    assert [of_rank[0][0] for of_rank in found] == [header, header + 3 * small, header, header]
    pieces = [large // 4 + (i < large % 4) for i in range(4)]
    # The source hands a piece to each of the three others, and its own to all; they pass theirs on to two each.
    source = sum(pieces) - pieces[1] + 3 * pieces[1]
    passed = [2 * pieces[rank] if rank != 1 else source for rank in range(4)]
    assert [of_rank[1][0] for of_rank in found] == [header + sent for sent in passed]
    assert [of_rank[1][1] for of_rank in found] == [0, 3 * 1_200_000, 0, 0]


def timed(rank: int) -> None:
    ncd.all_reduce(torch.ones(1))
    ncd.reset_stats()
    assert ncd.stats() == {}
    start = time.perf_counter()
    for _ in range(5):
        ncd.all_reduce(torch.ones(200_000), codec="int4")
    for work in [ncd.all_reduce(torch.ones(50_000), async_op=True) for _ in range(5)]:
        work.wait()  # type: ignore[union-attr]
    elapsed = time.perf_counter() - start
    found = ncd.stats()["all_reduce"]
    assert found.calls == 10
    seconds = (found.encode_seconds, found.wire_seconds, found.decode_seconds)
    assert min(seconds) > 0.0
    assert sum(seconds) <= elapsed

    found.calls = 99
    assert ncd.stats()["all_reduce"].calls == 10  # a copy was given
    ncd.all_gather([torch.ones(3), torch.ones(3)], torch.ones(3))
    assert set(ncd.stats()) == {"all_reduce", "all_gather"}
    ncd.reset_stats()
    assert ncd.stats() == {}
    assert ncd.OpStats().ratio == 1.0


def test_seconds_are_positive_and_add_up_to_no_more_than_passed() -> None:
    run(2, timed)


def profiled(rank: int) -> dict[str, list[tuple[str, float]]]:
    ncd.all_reduce(torch.ones(1))
    mesh = init_device_mesh("cpu", (2, 1))
    found = {}
    for name in ("sync", "async", "mesh", "others"):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            x = mixed(100_000, seed=rank)
            if name == "sync":
                ncd.all_reduce(x)
            elif name == "async":
                ncd.all_reduce(x, async_op=True).wait()  # type: ignore[union-attr]
            elif name == "mesh":
                ncd.all_reduce(x, group=mesh)
            else:
                ncd.all_to_all_single(torch.empty_like(x), x)
                ncd.all_gather([torch.empty_like(x)] * 2, x)
        found[name] = [(e.name, e.time_range.elapsed_us()) for e in profile.events() or () if "narrowcast" in e.name]
    return found


def outlived(rank: int) -> None:
    """Collectives that are still in flight when the profile ends, again and again."""
    for _ in range(20):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            work = [ncd.all_reduce(torch.ones(20_000), async_op=True) for _ in range(3)]
        for one in work:
            one.wait()  # type: ignore[union-attr]
        assert any(event.name == "narrowcast::all_reduce" for event in profile.events() or ())


def test_a_profile_may_end_before_the_collectives_that_it_saw_begin() -> None:
    run(2, outlived)


def test_the_profiler_shows_collectives_and_what_they_spend() -> None:
    for found in run(2, profiled):
        spent = {run: dict(ranges) for run, ranges in found.items()}
        for run_name in ("sync", "mesh"):
            assert spent[run_name].keys() >= {"narrowcast::all_reduce", "narrowcast::encode", "narrowcast::decode"}
        assert spent["async"].keys() >= {"narrowcast::all_reduce", "narrowcast::all_reduce wait"}
        assert spent["others"].keys() >= {"narrowcast::all_to_all_single", "narrowcast::all_gather"}
