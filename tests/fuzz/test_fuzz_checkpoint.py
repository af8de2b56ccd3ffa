"""Random states through files and folders, random damage to them, and random interleavings of saves and loads.

What comes back is what was saved, bit for bit, or, of a file that was changed, a `CheckpointError`: never another
error, and never another tensor where checksums are compared.
"""

from __future__ import annotations

import copy
import json
import os
import struct
import tempfile
import threading
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from campaign import campaign
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import narrowcast as nc
from narrowcast.checkpoint import load_state, read, save_state
from narrowcast.checkpoint.header import NAMES
from narrowcast.codecs.payload import EncodedRows, encode_rows
from narrowcast.errors import CheckpointError, LoadWarning, NarrowcastError

State = dict[str, Any]
CODECS = ["int8", "int4", "int3:block=8", "nf4", "apot4", "fp8_e4m3:block=32", "sign", "bf16", "int8:block=row"]
LIMITS = [1, 40, 200, 2000, "5GB"]
NAMES_OF_TENSORS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12).filter(lambda x: x != "__metadata__")
INDEX = "model.safetensors.index.json"


@contextmanager
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def filled(dtype: torch.dtype, shape: list[int], seed: int) -> torch.Tensor:
    """Any bytes at all, but for bool, whose bytes are 0 and 1."""
    count = torch.Size(shape).numel() * dtype.itemsize
    random = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=random)
    raw = raw % 2 if dtype == torch.bool else raw
    return raw.view(dtype).view(shape) if count else torch.empty(shape, dtype=dtype)


@st.composite
def states(draw: st.DrawFn) -> State:
    """Tensors of every dtype, empty ones, numbers, rows of any codec, transposed ones, and ties."""
    state: State = {}
    for name in draw(st.lists(NAMES_OF_TENSORS, min_size=1, max_size=8, unique=True)):
        kind = draw(st.sampled_from(["plain", "plain", "rows", "transposed", "tied"]))
        shape = draw(st.lists(st.integers(0, 5), max_size=4))
        seed = draw(st.integers(0, 1000))
        if kind == "tied" and state:
            state[name] = state[draw(st.sampled_from(sorted(state)))]
        elif kind == "rows":
            weight = torch.randn(
                draw(st.integers(1, 4)), draw(st.integers(1, 70)), generator=torch.Generator().manual_seed(seed)
            )
            dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
            state[name] = encode_rows(weight.to(dtype), draw(st.sampled_from(CODECS)))
        else:
            tensor = filled(draw(st.sampled_from(list(NAMES))), shape, seed)
            state[name] = tensor.transpose(0, -1) if kind == "transposed" and len(shape) > 1 else tensor
    return state


def facts(state: State) -> dict[str, Any]:
    """All that must be the same: what a tensor is, and its bytes."""

    def of(value: Any) -> Any:
        tensor = value.data if isinstance(value, EncodedRows) else value
        about = (value.codec.spec, tuple(value.shape), value.dtype) if isinstance(value, EncodedRows) else None
        raw = tensor.contiguous().flatten().view(torch.uint8).tolist() if tensor.numel() else []
        return (about, tensor.dtype, tuple(tensor.shape), raw)

    return {name: of(value) for name, value in state.items()}


# -- there and back ---------------------------------------------------------------------------------------------------


@campaign(60)
@given(states(), st.lists(st.sampled_from(LIMITS), min_size=1, max_size=3))
def test_any_state_comes_back_from_a_file_and_from_a_folder_that_is_saved_over_again(
    state: State, limits: list[Any]
) -> None:
    with folder() as place:
        save_state(state, place / "x.safetensors")
        assert facts(load_state(place / "x.safetensors")) == facts(state)
        for limit in limits:
            save_state(state, place / "folder", max_shard_size=limit)
            found = load_state(place / "folder")
            assert facts(found) == facts(state)
            for name, value in state.items():
                for other, same in state.items():
                    if same is value and not isinstance(value, EncodedRows) and value.numel():
                        assert found[name] is found[other]
        listed = {file.path.name for file in read(place / "folder").files}
        listed |= {INDEX} if len(listed) > 1 else set()
        assert {path.name for path in (place / "folder").iterdir()} == listed


@campaign(60)
@given(states())
def test_safetensors_reads_the_same_tensors_from_a_file(state: State) -> None:
    with folder() as place:
        save_state(state, place / "x.safetensors")
        theirs = safetensors.torch.load_file(place / "x.safetensors")
        ours = {name: value for name, value in read(place / "x.safetensors").mapped().items() if name in theirs}
        assert facts(ours) == facts(theirs)


# -- models -----------------------------------------------------------------------------------------------------------


@st.composite
def models(draw: st.DrawFn) -> Callable[[], nn.Module]:
    """A function that builds a random model, the same each time but for its values: layers, ties, buffers, dtypes."""
    kinds = draw(
        st.lists(st.sampled_from(["linear", "conv", "norm", "embed", "bag", "up", "attention"]), min_size=1, max_size=5)
    )
    tie, dtype = draw(st.booleans()), draw(st.sampled_from([torch.float32, torch.bfloat16]))
    makers: dict[str, Callable[[], nn.Module]] = {
        "linear": lambda: nn.Linear(16, 16),
        "conv": lambda: nn.Conv1d(4, 3, 20),
        "norm": lambda: nn.BatchNorm1d(5),
        "embed": lambda: nn.Embedding(9, 16),
        "bag": lambda: nn.EmbeddingBag(9, 16),
        "up": lambda: nn.ConvTranspose2d(3, 2, 3),
        "attention": lambda: nn.MultiheadAttention(16, 2),
    }

    def build() -> nn.Module:
        model = nn.Sequential(*(makers[kind]() for kind in kinds)).to(dtype)
        linear = [module for module in model if isinstance(module, nn.Linear)]
        if tie and len(linear) > 1:
            linear[-1].weight = linear[0].weight
        return model

    return build


@campaign(40)
@given(models(), st.sampled_from([None, *CODECS]), st.sampled_from(LIMITS), st.sampled_from(["same", "float", "meta"]))
def test_any_model_comes_back_into_any_model_like_it(
    build: Callable[[], nn.Module], codec: str | None, limit: Any, into: str
) -> None:
    with folder() as place:
        model = build()
        if codec:
            nc.quantize_(model, codec)
        nc.save(model, place / "x", max_shard_size=limit)
        other = copy.deepcopy(model) if into == "same" else build()
        other = other.to("meta") if into == "meta" else other
        held = dict(other.named_parameters())
        nc.load(place / "x", other)
        assert facts(other.state_dict()) == facts(model.state_dict())
        assert nc.nn.encodings(other) == nc.nn.encodings(model)
        ties = [[id(value) for value in one.state_dict(keep_vars=True).values()] for one in (model, other)]
        assert len({*ties[0]}) == len({*ties[1]})
        if into != "meta":
            rows = nc.nn.encodings(other) if into == "float" else {}
            assert all(own is held[name] for name, own in other.named_parameters() if name not in rows)


# -- damage -----------------------------------------------------------------------------------------------------------


@st.composite
def damages(draw: st.DrawFn) -> Callable[[bytes], bytes]:
    """What may happen to the bytes of a file on the way."""
    kind = draw(st.sampled_from(["flip", "cut", "add", "swap", "splice", "zero"]))
    at, to = draw(st.floats(0, 1)), draw(st.floats(0, 1))
    junk, bit = draw(st.binary(min_size=1, max_size=12)), draw(st.integers(0, 7))

    def damage(content: bytes) -> bytes:
        first, last = (int(place * (len(content) - 1)) for place in (at, to))
        if kind == "flip":
            return content[:first] + bytes([content[first] ^ (1 << bit)]) + content[first + 1 :]
        if kind == "cut":
            return content[: min(first, last)] + content[max(first, last) :]
        if kind == "add":
            return content[:first] + junk + content[first:]
        if kind == "splice":
            return content[:first] + content[last : last + 64] + content[first + 64 :]
        if kind == "zero":
            return content[:first] + bytes(min(16, len(content) - first)) + content[first + 16 :]
        low, high = sorted((first, last))
        return (
            content[:low]
            + content[high : high + 1]
            + content[low + 1 : high]
            + content[low : low + 1]
            + content[high + 1 :]
        )

    return damage


def loads_or_is_refused(path: Path, wanted: dict[str, Any]) -> None:
    try:
        found = load_state(path)
    except CheckpointError as caught:
        words = str(caught)
    else:
        assert facts(found) == wanted
        return
    assert len(words) < 2000


@campaign(120)
@given(states(), st.lists(damages(), min_size=1, max_size=2))
def test_a_damaged_file_is_refused_or_nothing_of_it_has_changed(
    state: State, damage: list[Callable[[bytes], bytes]]
) -> None:
    with folder() as place:
        path = place / "x.safetensors"
        save_state(state, path, metadata={"step": 1})
        content = path.read_bytes()
        for one in damage:
            content = one(content) or b"?"
        path.write_bytes(content)
        loads_or_is_refused(path, facts(state))


@campaign(60)
@given(states(), damages(), st.floats(0, 1))
def test_a_damaged_folder_is_refused_or_nothing_of_it_has_changed(
    state: State, damage: Callable[[bytes], bytes], which: float
) -> None:
    with folder() as place:
        save_state(state, place, max_shard_size=1)
        paths = sorted(place.iterdir())
        path = paths[int(which * (len(paths) - 1))]
        path.write_bytes(damage(path.read_bytes()) or b"?")
        try:
            found = load_state(place)
        except CheckpointError:
            return
        assert facts(found) == facts(state)


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["w", "int4"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)
FIELDS = ["version", "tensors", "checksums", "tied", "user", "inputs"]


@campaign(120)
@given(
    st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=3),
    st.dictionaries(st.sampled_from(["codec", "shape", "dtype"]), VALUES),
)
def test_metadata_that_says_anything_is_refused_or_describes_the_bytes(changes: State, described: State) -> None:
    rows = bytes(range(96))
    entry = {"dtype": "U8", "shape": [2, 48], "data_offsets": [0, 96]}
    about = {"codec": "int4", "shape": [2, 64], "dtype": "float32"} | described
    text = json.dumps(
        {"version": 1, "tensors": {"w": about}, "checksums": {"w": f"{zlib.crc32(rows):08x}"}, "tied": {}, "user": {}}
        | changes
    )
    seal = f"{zlib.crc32(json.dumps([[['w', 'U8', [2, 48]]], text]).encode()):08x}"
    header = json.dumps({"__metadata__": {"narrowcast": text, "narrowcast.crc32": seal}, "w": entry}).encode()
    with folder() as place:
        (place / "x.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + rows)
        try:
            found = load_state(place / "x.safetensors")["w"]
        except CheckpointError:
            return
        data = found.data if isinstance(found, EncodedRows) else found
        assert bytes(data.flatten().tolist()) == rows


ENTRIES = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from([*NAMES.values(), "F4", "X"]),
        "shape": st.lists(st.integers(-1, 3) | st.just(2**63), max_size=4),
        "data_offsets": st.lists(st.integers(-1, 24), min_size=1, max_size=3),
    }
)


@campaign(200)
@given(st.dictionaries(st.text(max_size=3), ENTRIES, max_size=4), st.integers(0, 24))
def test_a_header_is_read_only_as_safetensors_reads_it(entries: State, size: int) -> None:
    header = json.dumps(entries).encode()
    with folder() as place:
        path = place / "x.safetensors"
        path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(range(1, size + 1)))
        try:
            found = load_state(path)
        except CheckpointError:
            return
        assert facts(found) == facts(safetensors.torch.load_file(path))


# -- at the same time -------------------------------------------------------------------------------------------------


def numbered(number: int, count: int) -> State:
    return {f"w{i}": torch.full((3,), float(number)) for i in range(count)}


@campaign(15)
@given(
    st.lists(
        st.lists(st.tuples(st.integers(1, 6), st.sampled_from(LIMITS)), min_size=1, max_size=6), min_size=1, max_size=3
    ),
    st.integers(1, 3),
)
def test_saves_and_loads_in_any_order_give_one_save_whole(plans: list[list[tuple[int, Any]]], readers: int) -> None:
    """Each plan is a saver: how many tensors, in files of which size. Loads go on until all have saved."""
    with folder() as place:
        save_state(numbered(0, 2), place, max_shard_size=1)
        counts = {0: 2}
        failures: list[BaseException] = []
        done = threading.Event()

        def saver(which: int, plan: list[tuple[int, Any]]) -> None:
            for turn, (count, limit) in enumerate(plan):
                number = 1 + which + 10 * turn
                counts[number] = count
                save_state(numbered(number, count), place, max_shard_size=limit)

        def reader() -> None:
            while True:
                last = done.is_set()
                state = load_state(place)
                (number,) = {float(x) for tensor in state.values() for x in tensor}  # type: ignore[union-attr]
                assert state.keys() == numbered(0, counts[int(number)]).keys()
                if last:
                    return

        def watched(work: Callable[..., None], *arguments: Any) -> threading.Thread:
            def run() -> None:
                try:
                    work(*arguments)
                except BaseException as error:
                    failures.append(error)

            thread = threading.Thread(target=run)
            thread.start()
            return thread

        loading = [watched(reader) for _ in range(readers)]
        for thread in [watched(saver, which, plan) for which, plan in enumerate(plans)]:
            thread.join(120)
        done.set()
        for thread in loading:
            thread.join(120)
        assert not failures, failures
        left = {path.name for path in place.iterdir()}
        named = {file.path.name for file in read(place).files}
        assert left == named | ({INDEX} if named != {"model.safetensors"} else set())


@campaign(30)
@given(st.sampled_from(LIMITS), st.sampled_from(LIMITS), st.integers(0, 20), st.integers(1, 6))
def test_a_save_that_ends_anywhere_leaves_the_old_or_the_new(old: Any, new: Any, step: int, count: int) -> None:
    """As if the process ended before one of its renames and removals: nothing behind it is done."""
    real = {name: getattr(os, name) for name in ("replace", "unlink")}
    left = [step]

    def ending(name: str) -> Callable[..., Any]:
        def watched(*arguments: Any, **options: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt
            return real[name](*arguments, **options)

        return watched

    with folder() as place:
        save_state(numbered(1, 4), place, max_shard_size=old)
        try:
            for name in real:
                setattr(os, name, ending(name))
            save_state(numbered(2, count), place, max_shard_size=new)
        except KeyboardInterrupt:
            pass
        finally:
            for name, function in real.items():
                setattr(os, name, function)
        assert facts(load_state(place)) in (facts(numbered(1, 4)), facts(numbered(2, count)))
        save_state(numbered(3, 3), place, max_shard_size=new)
        assert facts(load_state(place)) == facts(numbered(3, 3))


@campaign(40)
@given(models(), models(), st.sampled_from(CODECS), st.sampled_from([None, *CODECS]))
def test_a_file_of_another_model_or_codec_is_refused_and_changes_nothing(
    build: Callable[[], nn.Module], other: Callable[[], nn.Module], codec: str, own: str | None
) -> None:
    with folder() as place:
        model, into = build(), other()
        nc.quantize_(model, codec)
        if own:
            nc.quantize_(into, own)
        nc.save(model, place / "x.safetensors")
        before, encoded = facts(into.state_dict()), nc.nn.encodings(into)
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always", LoadWarning)
                nc.load(place / "x.safetensors", into)
        except NarrowcastError:
            assert facts(into.state_dict()) == before
            assert nc.nn.encodings(into) == encoded
            return
        if any(warning.category is LoadWarning for warning in caught):  # a weight has an encoded form in `model` only
            assert nc.nn.encodings(into).items() < nc.nn.encodings(model).items()
            nc.dequantize_(into)
            nc.dequantize_(model)
        assert facts(into.state_dict()) == facts(model.state_dict())
        assert nc.nn.encodings(into) == nc.nn.encodings(model)
