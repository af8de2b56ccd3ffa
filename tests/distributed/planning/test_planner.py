"""codec="auto": what is predicted, by hand; what is measured, the same on every rank; and the choice."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hosted import launched
from ranks import run
from torch.nn.parallel import DistributedDataParallel as DDP

import narrowcast as nc
from narrowcast import distributed as ncd
from narrowcast import errors
from narrowcast.distributed.gradients import layout
from narrowcast.distributed.gradients.compression import GradientCompression
from narrowcast.distributed.gradients.ddp import average_bucket
from narrowcast.distributed.gradients.ddp_buckets import DdpBucket
from narrowcast.distributed.planning import devices
from narrowcast.distributed.planning import link as links
from narrowcast.distributed.planning import planner as planning
from narrowcast.distributed.planning.codec_speed import CodecSpeed, measure_codecs
from narrowcast.distributed.planning.link import Link, link_on_paper, measure_link, slowest
from narrowcast.distributed.planning.planner import Plan, choose, decide
from narrowcast.distributed.planning.prediction import Prediction, predict, predict_by_hosts, predict_plain
from narrowcast.distributed.protocols import two_stage
from narrowcast.distributed.transport.group import group_for

LINK = Link(latency_s=0.5, bandwidth_bytes_per_s=1000.0)
SPEED = CodecSpeed(encode_s=2.0, sum_s=3.0, decode_s=5.0, add_s=7.0, noise=0.25)
INT8 = nc.codec("int8")

# -- predictions by hand -----------------------------------------------------------------------------------------------


def test_a_ring_sends_twice_the_bytes_less_a_share_in_twice_the_steps() -> None:
    found = predict_plain([1000, 1000, 50], 4, LINK, torch.bfloat16)
    assert found.bytes == 2 * 3000 + 150  # 2 * 3/4 of 2 bytes an element
    assert found.seconds == pytest.approx(3 * 6 * 0.5 + 6150 / 1000)
    assert (found.codec, found.coding_seconds, found.noise) == ("none", 0.0, 0.0)


def test_a_ring_that_was_measured_has_its_own_steps_and_rate() -> None:
    link = Link(0.5, 1000.0, step_s=0.1, ring_bytes_per_s=10.0)
    assert predict_plain([10], 2, link).seconds == pytest.approx(2 * 0.1 + 40 / 10)


def test_a_small_all_reduce_takes_two_trips_its_bytes_and_its_coding_one_after_the_other() -> None:
    found = predict([512], 4, LINK, INT8, SPEED)
    nbytes = 3 * (2 * INT8.row_bytes(128) + 32)  # rows there and back, and a header
    coding = 512 * (3 / 4 * 2.0 + 3.0 + 5.0)
    assert found.bytes == nbytes
    assert found.coding_seconds == pytest.approx(coding)
    assert found.wire_seconds == pytest.approx(2 * 0.5 + nbytes / 1000)
    assert found.seconds == pytest.approx(found.wire_seconds + found.coding_seconds)


@pytest.mark.parametrize("overlap", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("decode_s", [1e-9, 1.0])
def test_pieces_hide_the_shorter_of_wire_and_coding_but_for_one_piece(overlap: float, decode_s: float) -> None:
    link, speed = Link(0.5, 1e6, overlap=overlap), CodecSpeed(0.0, 0.0, decode_s, 0.0, 0.0)
    numel = 2 * 2 * 768 * 1024  # two rows of the largest size for each of two ranks: pieces of which are 2, and a small
    found = predict([numel], 2, link, INT8, speed)
    wire, coding = found.wire_seconds, found.coding_seconds
    assert wire == pytest.approx(3 * 0.5 + found.bytes / 1e6)
    pieces = len(two_stage.cut(numel, 2, INT8, 128 * 1024))
    assert pieces == 4
    assert found.seconds == pytest.approx(max(wire, coding) + min(wire, coding) * (1 - overlap * 3 / 4))


def test_drag_makes_reductions_longer_and_leaves_the_ring_alone() -> None:
    slow = Link(0.5, 1000.0, drag=2.0)
    assert predict([512], 4, slow, INT8, SPEED).seconds == 2 * predict([512], 4, LINK, INT8, SPEED).seconds
    assert predict_plain([512], 4, slow) == predict_plain([512], 4, LINK)


@pytest.mark.parametrize(
    ("feedback", "spec", "more"),
    [
        (False, "int4", 0.0),
        ("owner", "int4", 1 / 4 * 4 * 7.0),
        (True, "int4", 1 / 4 * 4 * 7.0 + 3 / 4 * (5.0 + 2 * 7.0)),
        (None, "int4", 1 / 4 * 4 * 7.0 + 3 / 4 * (5.0 + 2 * 7.0)),
        (None, "int8", 0.0),  # which needs none
    ],
)
def test_gradients_are_gathered_and_scattered_and_feedback_takes_passes_more(
    feedback: Any, spec: str, more: float
) -> None:
    codec = nc.codec(spec)
    plain = predict([5120], 4, LINK, codec, SPEED)
    found = predict([5120], 4, LINK, codec, SPEED, gradients=True, error_feedback=feedback)
    assert found.coding_seconds - plain.coding_seconds == pytest.approx(5120 * (2 * 7.0 + more))


def test_equal_buckets_count_as_often_as_there_are() -> None:
    one, many = (predict([5120] * count, 4, LINK, INT8, SPEED) for count in (1, 100_000))
    assert many.bytes == 100_000 * one.bytes
    assert many.seconds == pytest.approx(100_000 * one.seconds)


def sent_bytes(rank: int, cases: list[tuple[str, int]]) -> list[int]:
    found = []
    for spec, numel in cases:
        ncd.reset_stats()
        ncd.all_reduce(torch.ones(numel), codec=spec)
        found.append(ncd.stats()["all_reduce"].sent_bytes)
        state = GradientCompression(spec, exempt=None)
        weight = torch.ones(numel)
        average_bucket(state, DdpBucket(weight, [weight], [0], 0, True)).wait()
        found.append(state.stats().sent_bytes)
    return found


@pytest.mark.parametrize("world", [2, 3])
def test_predicted_bytes_are_those_that_are_sent(world: int) -> None:
    # With and without a piece for the header, and in several pieces. All parts are whole, so ranks send alike.
    cases = [("int8", 128 * world), ("int4", 300 * 128 * world), ("raw", 2560 * 128 * world)]
    for found in run(world, sent_bytes, cases):
        predicted = [
            predict([numel], world, LINK, nc.codec(spec), SPEED, gradients=gradients).bytes
            for spec, numel in cases
            for gradients in (False, True)
        ]
        assert found == predicted


def test_by_hosts_the_codec_travels_between_hosts_in_shares_and_bytes_within_them_are_added() -> None:
    link = Link(0.5, 1000.0, ring_bytes_per_s=2000.0, local_bytes_per_s=100.0)
    found = predict_by_hosts([1024, 1023], 4, 2, link, INT8, SPEED)
    between = predict([512, 512], 2, link, INT8, SPEED)
    inside = 4 * 2047 * 2 * (1 / 2) / 100
    assert found.bytes == 2 * between.bytes  # both ranks of a host
    assert found.seconds == pytest.approx(between.seconds + inside)
    assert (found.coding_seconds, found.noise) == (between.coding_seconds, between.noise)


def test_hosts_on_paper_share_a_link_which_a_ring_crosses_once() -> None:
    link = link_on_paper(8e9, places=4, local_bits_per_s=80e9)
    assert (link.bandwidth_bytes_per_s, link.ring_bytes_per_s) == (0.95e9 / 4, 0.95e9)
    assert link.local_bytes_per_s == 10e9
    assert link_on_paper(8e9, places=1).ring_bytes_per_s is None
    made = decide([1000], 8, link, {"int8": SPEED}, hosts=2)
    assert (made.hosts, made.as_dict()["hosts"]) == (2, 2)
    with pytest.raises(errors.SpecError, match="hosts=3: 8 ranks cannot share them evenly"):
        decide([1000], 8, link, {"int8": SPEED}, hosts=3)


def hosts_planned(rank: int) -> tuple[Plan, Any]:
    launched(rank, 2, 2)
    made = planning.plan([100_000], candidates=["int8"])
    state = nc.compress_gradients(DDP(torch.nn.Linear(64, 64)), "auto")
    return made, state.plan


def test_live_ranks_of_hosts_measure_the_link_between_them() -> None:
    found = run(4, hosts_planned)
    assert all(each == found[0] for each in found)
    for made in found[0]:
        assert (made.ranks, made.hosts) == (4, 2)
        assert 1e6 < made.link.local_bytes_per_s < 1e12


def test_a_link_on_paper_leaves_room_for_frames_and_counts_every_row() -> None:
    link = link_on_paper(1e9, 1e-3)
    assert link.bandwidth_bytes_per_s == 0.95 * 1.25e8
    one_row, many = (predict([128 * n], n, link, INT8, CodecSpeed(0, 0, 0, 0, 0)) for n in (2, 512))
    assert one_row.seconds == pytest.approx(2 * (1e-3 + links.MESSAGE_S["cpu"]) + one_row.bytes / (0.95 * 1.25e8))
    assert many.seconds == pytest.approx(2 * (1e-3 + 511 * links.MESSAGE_S["cpu"]) + many.bytes / (0.95 * 1.25e8))


def test_messages_hide_behind_the_wire_as_coding_does() -> None:
    # bench/results/messages.md: on a slow link the same bytes took as long in 64 times as many rows.
    numel, speed = 2 * 2 * 768 * 1024, CodecSpeed(0.0, 0.0, 1e-9, 0.0, 0.0)
    chunks = len(two_stage.cut(numel, 2, INT8, 128 * 1024))
    link = Link(0.0, 1e6, message_s=1e-3)
    found = predict([numel], 2, link, INT8, speed)
    assert found.message_seconds == pytest.approx((1 + 2 * chunks) * 1e-3)
    work = found.message_seconds + found.coding_seconds
    assert found.seconds == pytest.approx(found.wire_seconds + work / chunks)


def test_with_many_ranks_a_bucket_goes_in_fewer_messages_of_33_kilobytes() -> None:
    for ranks in (2, 8, 32, 64, 256):
        chunks = layout.lay_out([layout.Gradient("", 0, 6_553_600, False)], ranks)
        whole = [chunk.columns for chunk in chunks[:-1]]
        assert all(nc.codec("int4").row_bytes(columns) >= 33_000 for columns in whole), ranks
    assert len(layout.lay_out([layout.Gradient("", 0, 6_553_600, False)], 64)) == 2


@pytest.mark.parametrize("name", list(devices.DEVICES))
def test_a_derived_speed_is_the_measured_one_times_the_ratio_of_memory_bandwidths(name: str) -> None:
    codecs = [nc.codec(spec) for spec in ("bf16", "int8", "int4")]
    device, h200 = devices.find_device(name), devices.find_device("H200")
    there, here = (devices.derived_speeds(codecs, each) for each in (device, h200))
    ratio = 4800 / device.memory_gb_per_s
    for spec, speed in there.items():
        assert speed.encode_s == pytest.approx(ratio * here[spec].encode_s)
        assert speed.noise == here[spec].noise
    # 4 bytes are read and about one is written: at 104% of a copy's 4.23 TB/s.
    assert here["int8"].encode_s == pytest.approx((4 + 1 + 4 / 128) / (1.041 * 4.23e12), rel=0.01)


def test_the_measured_times_are_those_of_the_results() -> None:
    results = (Path(__file__).parents[3] / "bench/results/gpu-h200.md").read_text()
    for name, times in devices.H200_MS.items():
        if name.startswith("fp8"):
            name = "fp8_e4m3:block=128"
        (line,) = (line.split() for line in results.splitlines() if line.split()[:1] == [name])
        assert tuple(float(line[i]) for i in (1, 4, 7)) == times, name


def test_the_name_of_a_gpu_may_be_spelled_as_people_do_and_an_unknown_one_lists_the_known() -> None:
    for name, known in (("rtx 4090", "RTX-4090"), ("GeForce RTX 4090", "RTX-4090"), ("a100-40gb", "A100-40GB")):
        assert devices.find_device(name).name == known
    assert devices.find_device("A10G").name == "A10"
    for name in ("", "RTX", "H", "MI300X", "4"):
        with pytest.raises(errors.SpecError, match=r"is not a GPU that is known here. Known are B200, H200, H100"):
            devices.find_device(name)


# -- the choice --------------------------------------------------------------------------------------------------------


def candidate(codec: str, seconds: float, noise: float) -> Prediction:
    return Prediction(codec, seconds, seconds, 0.0, 1, noise)


@pytest.mark.parametrize(
    ("seconds", "margin", "chosen", "reason"),
    [
        ((10.0, 5.0, 2.0), 0.1, "int4", "int4: the fastest, and nothing more precise is within 10% of it."),
        (
            (10.0, 2.1, 2.0),
            0.1,
            "int8",
            "int8: 5.0% slower than the fastest (int4), which is within 10%, and the most precise that is.",
        ),
        ((10.0, 2.1, 2.0), 0.0, "int4", "int4: the fastest, and nothing more precise is within 0% of it."),
        ((1.0, 2.0, 2.0), 0.1, "none", "none: no codec is faster."),
        (
            (2.1, 1.9, 2.0),
            0.25,
            "none",
            "none: 10.5% slower than the fastest (int8), which is within 25%, and without loss.",
        ),
        ((2.0, 2.0, 2.0), 0.0, "none", "none: no codec is faster."),
    ],
)
def test_the_most_precise_codec_within_the_margin_of_the_fastest_is_chosen(
    seconds: tuple[float, float, float], margin: float, chosen: str, reason: str
) -> None:
    none, int8, int4 = (candidate(*given) for given in zip(("none", "int8", "int4"), seconds, (0, 1, 2), strict=True))
    for order in ([none, int8, int4], [int4, int8, none]):
        best, said = choose(order, margin)
        assert (best.codec, said) == (chosen, reason)


def test_what_is_chosen_is_never_predicted_to_be_slower_than_none() -> None:
    draw = random.Random(0)
    for _ in range(1000):
        made = [candidate(f"c{i}", draw.uniform(0.5, 2), draw.random()) for i in range(4)]
        none = candidate("none", draw.uniform(0.5, 2), 0.0)
        best, _ = choose([*made, none], draw.choice([0.0, 0.1, 0.5]))
        assert best.seconds <= none.seconds


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: choose([]), ["predictions:", "at least one"]),
        (lambda: choose([candidate("none", 1, 0)], -0.1), ["margin=-0.1", "zero or more", "0.1 for 10%"]),
        (lambda: decide([], 4, LINK, {}), ["buckets=[]", "at least one", "buckets_of"]),
        (lambda: decide([5, 0], 4, LINK, {}), ["buckets=[5, 0]"]),
        (lambda: decide([5], 1, LINK, {}), ["ranks=1", "two ranks"]),
    ],
)
def test_what_cannot_be_planned_is_refused(call: Any, words: list[str]) -> None:
    with pytest.raises(errors.SpecError) as caught:
        call()
    assert all(word in str(caught.value) for word in words)


def test_candidates_leave_a_model_as_good_and_take_fewer_bits_than_its_gradients() -> None:
    assert planning.candidates_for(torch.float32) == ("bf16", "int8", "int6", "int4")
    assert planning.candidates_for(torch.bfloat16, True) == ("int8", "int6", "int4")
    assert planning.candidates_for(torch.float32, False) == ("bf16", "int8")  # below 8 bits feedback is needed


def test_a_slow_link_gets_few_bits_and_a_fast_one_none() -> None:
    ns = 1e-9
    speeds = {
        name: CodecSpeed(ns, ns, ns, ns, noise) for name, noise in (("bf16", 1e-6), ("int8", 1e-4), ("int4", 1e-2))
    }
    buckets = planning.buckets_of(100_000_000)
    chosen = [decide(buckets, 8, link_on_paper(rate), speeds).chosen for rate in (1e8, 1e9, 1e12)]
    assert chosen == ["int4", "int4", "none"]


def test_buckets_hold_every_parameter_once() -> None:
    assert planning.buckets_of(15 << 18, torch.float32, 5.0) == [5 << 18] * 3
    assert planning.buckets_of((5 << 18) + 7, torch.float32, 5.0) == [5 << 18, 7]
    assert planning.buckets_of(9, torch.bfloat16) == [9]


def test_a_plan_prints_as_a_table_with_its_choice_and_travels_as_json() -> None:
    made = decide([1000, 1000, 7], 4, LINK, {"int8": SPEED})
    lines = str(made).splitlines()
    assert [line.split()[0] for line in lines] == ["codec", "none", "int8", "none:"]
    assert [line.endswith("<") for line in lines] == [False, True, False, False]
    found = json.loads(json.dumps(made.as_dict()))
    assert found["buckets"] == [[1000, 2], [7, 1]]
    assert (found["chosen"], found["dtype"], found["ranks"]) == ("none", "float32", 4)
    assert found["predictions"][1]["bytes"] == made.predictions[1].bytes


# -- what is measured --------------------------------------------------------------------------------------------------


def test_codecs_are_timed_and_ordered_by_their_noise() -> None:
    names = ["raw", "bf16", "int8", "int6", "int4", "int2", "int4:stochastic=true"]
    state = torch.get_rng_state()
    found = measure_codecs([nc.codec(name) for name in names], ranks=4)
    assert torch.equal(torch.get_rng_state(), state)
    assert list(found) == names
    noise = [found[name].noise for name in names[:6]]
    assert noise[0] == 0.0
    assert noise == sorted(set(noise))
    for speed in found.values():
        # An element is read, coded and written in more than a hundredth of a cycle and less than 10 us.
        assert all(1e-12 < s < 1e-5 for s in (speed.encode_s, speed.sum_s, speed.decode_s, speed.add_s))


def shared(rank: int) -> list[float]:
    peers = group_for(dist.distributed_c10d._get_default_group(), torch.device("cpu"))
    return slowest(peers, [1 / 3 + rank * 2.0**-54, -float(rank), math.pi * 1e-300])


def test_the_slowest_ranks_numbers_reach_every_rank_to_the_last_bit() -> None:
    expected = [1 / 3 + 2 * 2.0**-54, 0.0, math.pi * 1e-300]
    assert expected[0] != 1 / 3  # one bit apart
    assert run(3, shared) == [expected] * 3


def planned(rank: int) -> tuple[Plan, Plan | None, Any, list[str]]:
    torch.manual_seed(rank)
    state = torch.get_rng_state()
    # In bf16 the first is large enough for several pieces, so that a real reduction is timed, too.
    made = planning.plan([4_000_000, 2000], gradients=False, candidates=["none", "int4", "bf16"], margin=0.3)
    codec, auto = planning.choose_codec(302_000, torch.bfloat16, None, "cpu", None)
    assert torch.equal(torch.get_rng_state(), state)
    return made, auto, codec, list(ncd.stats())


def test_every_rank_makes_the_same_plan() -> None:
    found = run(3, planned)
    assert all(each == found[0] for each in found)
    made, auto, codec, counted = found[0]
    assert [p.codec for p in made.predictions] == ["none", "int4", "bf16"]
    assert (made.ranks, made.buckets, made.margin) == (3, (4_000_000, 2000), 0.3)
    assert [p.codec for p in auto.predictions] == ["none", "int8", "int6", "int4"]
    assert codec == auto.codec
    assert counted == ["measure_link"]  # and not among anyone's collectives
    for link in (made.link, auto.link):
        # A trip of a few bytes on one machine, however busy; a stream through its memory.
        assert 1e-5 < link.latency_s < 1
        assert 1e-6 < link.step_s < 1
        assert 1e6 < link.bandwidth_bytes_per_s < 1e12
        assert 1e6 < link.ring_bytes_per_s < 1e12
        assert 0 <= link.overlap <= 1 <= link.drag


def disagreeing(rank: int) -> list[str]:
    said = []
    for options in ({"candidates": ["int8", "int4"][rank:]}, {"margin": 0.1 + rank}):
        with pytest.raises(errors.MismatchError) as caught:
            planning.plan([1000], **options)  # type: ignore[arg-type]
        said.append(str(caught.value))
    return said


def test_ranks_that_ask_for_different_plans_get_the_same_error() -> None:
    first, second = run(2, disagreeing)
    assert first == second
    assert "codecs=int8,int4" in first[0]
    assert "rank 1 called measure_link(codec=raw, values=1, codecs=int4, margin=0.1" in first[0]
    assert "margin=1.1" in first[1]


def in_another_order(rank: int) -> str:
    peers = group_for(dist.distributed_c10d._get_default_group(), torch.device("cpu"))
    with pytest.raises(errors.MismatchError) as caught:
        measure_codecs([nc.codec(name) for name in ["int8", "int4"][:: 1 - 2 * rank]], group=peers)
    return str(caught.value)


def test_numbers_of_one_codec_are_never_taken_for_anothers() -> None:
    first, second = run(2, in_another_order)
    assert first == second
    assert "codecs=int8,int4" in first
    assert "codecs=int4,int8" in first


def alone(rank: int) -> tuple[Any, str]:
    with pytest.raises(errors.CollectiveError) as caught:
        measure_link()
    return planning.choose_codec([10], torch.float32, None, "cpu", True), str(caught.value)


def test_a_group_of_one_rank_needs_no_plan_and_has_no_link() -> None:
    ((chosen, message),) = run(1, alone)
    assert chosen == (None, None)
    assert message == ("measure_link: a group of one rank has no link. It takes two ranks or more to measure one.")


def test_without_a_process_group_measuring_says_what_to_call() -> None:
    with pytest.raises(errors.CollectiveError, match="init_process_group"):
        measure_link()


def outside(rank: int) -> str:
    group = dist.new_group([0])
    if rank == 0:
        return ""
    with pytest.raises(errors.CollectiveError) as caught:
        measure_link(group)
    return str(caught.value)


def test_a_rank_outside_the_group_is_told_so() -> None:
    assert run(2, outside)[1] == "measure_link: this rank is not in the group. Call it on the ranks of the group alone."
