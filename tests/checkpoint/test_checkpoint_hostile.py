"""Files that are cut, changed, lying or made to do harm: a typed error that names the file, and nothing else."""

from __future__ import annotations

import json
import os
import pickle
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from forge import Tensors, about, forged, plain, raw, seal

from narrowcast.checkpoint import load_state, read, save_state
from narrowcast.codecs.payload import EncodedRows, encode_rows
from narrowcast.errors import CheckpointError, MissingFileError, NewerVersionError

ROWS: Tensors = {"w": ("U8", [2, 48], bytes(range(96)))}
"""Two rows of 64 elements in int4."""
W = {"codec": "int4", "shape": [2, 64], "dtype": "float32"}


def refused(path: Path, *words: str, error: type[CheckpointError] = CheckpointError) -> None:
    with pytest.raises(error) as caught:
        load_state(path)
    assert len(str(caught.value)) < 1000
    missing = [word for word in (path.name, *words) if word not in str(caught.value)]
    assert not missing, f"{missing} not in {caught.value}"


def test_the_forged_file_is_good_before_anything_is_changed(tmp_path: Path) -> None:
    found = load_state(forged(tmp_path / "x.safetensors", ROWS, tensors={"w": W}))["w"]
    assert isinstance(found, EncodedRows)
    assert found.data.flatten().tolist() == list(range(96))


# -- no safetensors file ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x08\0\0",
        b"\xff" * 8,
        (1 << 62).to_bytes(8, "little") + b"{}",
        (200_000_000).to_bytes(8, "little") + b"{}",
        (100).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"[]",
        (4).to_bytes(8, "little") + b"nope",
        (4).to_bytes(8, "little") + b'{"\xff}',
        (100_000).to_bytes(8, "little") + b'{"a":' + b"[" * 99_995,
        pickle.dumps({"weight": [1.0] * 100}),
        b"PK\x03\x04" + bytes(200),
    ],
    ids=["empty", "short", "ones", "2**62", "200 MB", "long", "list", "word", "utf8", "deep", "pickle", "zip"],
)
def test_what_is_no_safetensors_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.safetensors").write_bytes(content)
    refused(tmp_path / "x.safetensors", "not a whole safetensors file", "truncated, damaged, or of another kind")


@pytest.mark.parametrize("name", ["x.pt", "x.pth", "pytorch_model.bin", "x.ckpt", "X.PT"])
def test_a_pickle_is_named_as_one_with_what_to_do(tmp_path: Path, name: str) -> None:
    torch.save({"weight": torch.zeros(2, 2)}, tmp_path / name)
    refused(tmp_path / name, "is a pickle. Save it with safetensors.torch.save_file, or use nc.quantize_ in Python.")


def test_an_array_of_numpys_is_named_as_one_with_what_to_do(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros(8))
    refused(tmp_path / "a.npy", "not a safetensors file. narrowcast encode takes .npy files.")


def test_a_safetensors_file_may_have_any_name(tmp_path: Path) -> None:
    safetensors.torch.save_file({"x": torch.zeros(2)}, tmp_path / "x.bin")
    assert load_state(tmp_path / "x.bin").keys() == {"x"}


def entry(**changes: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ({"x": entry(data_offsets=[0, 80])}, "not a whole"),
        ({"x": entry(data_offsets=[8, 0])}, "not a whole"),
        ({"x": entry(data_offsets=[-8, 0])}, "not a whole"),
        ({"x": entry(data_offsets=[0, 4])}, "not a whole"),
        ({"x": entry(shape=[3])}, "not a whole"),
        ({"x": entry(shape=[1 << 62, 4])}, "not a whole"),
        ({"x": entry(shape=[1 << 70])}, "not a whole"),
        ({"x": entry(shape=[-2])}, "not a whole"),
        ({"x": entry(shape="ab")}, "not a whole"),
        ({"x": entry(dtype="F99")}, "not a whole"),
        ({"x": entry(), "y": entry()}, "not a whole"),
        ({"x": entry(), "y": entry(data_offsets=[4, 12])}, "not a whole"),
        ({"x": {"dtype": "F32"}}, "not a whole"),
        ({"__metadata__": {"a": 3}, "x": entry()}, "not a whole"),
        ({"__metadata__": [], "x": entry()}, "not a whole"),
        ({"x": entry(), "z": entry(shape=[0, 1 << 62, 1 << 62], data_offsets=[8, 8])}, "product is below 2**63"),
        ({"x": entry(), "z": entry(shape=[(1 << 63) + 1, 0], data_offsets=[8, 8])}, "product is below 2**63"),
        ({"x": entry(dtype="F4", shape=[16])}, "has the dtype 'F4'"),
        ({"x": entry(shape=[2] + [1] * 64)}, "'x' has 65 dimensions, and a tensor has at most 64"),
        ({"x": entry(), "z": entry(shape=[0] + [1 << 62] * 10**5, data_offsets=[8, 8])}, "'z' has 100001 dimensions"),
    ],
    ids=str,
)
def test_a_header_that_lies_is_refused(tmp_path: Path, header: dict[str, Any], words: str) -> None:
    refused(raw(tmp_path / "x.safetensors", header, bytes(8)), words)


def test_a_name_that_is_used_twice_is_refused(tmp_path: Path) -> None:
    one = json.dumps(entry())
    refused(raw(tmp_path / "x.safetensors", f'{{"x":{one},"x":{one}}}'.encode(), bytes(8)), "'x' is used twice")
    twice = f'{{"__metadata__":{{"a":"1","a":"2"}},"x":{one}}}'.encode()
    refused(raw(tmp_path / "y.safetensors", twice, bytes(8)), "'a' is used twice")


def test_as_many_dimensions_as_torch_takes_come_back(tmp_path: Path) -> None:
    save_state({"x": torch.ones([1] * 64)}, tmp_path / "x.safetensors")
    assert load_state(tmp_path / "x.safetensors")["x"].shape == (1,) * 64


COUNT = 40_000
ENTRY = '{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
LONG = "x" * 1_000_000


@pytest.mark.parametrize(
    "text",
    [
        json.dumps({"version": 1, "tied": {f"a{i}": "w" for i in range(COUNT)}}),
        json.dumps({"version": 1, "inputs": {f"a{i}": {"codec": "int8", "signed": True} for i in range(COUNT)}}),
        "{" + ",".join(f'"n{i % COUNT}":1' for i in range(2 * COUNT)) + "}",
        '{"version":1,"user":[' + ",".join(["9" * 4000] * 300) + "]}",
        '{"version":' + "9" * 10**6 + "}",
        '{"version":1,"user":' + "[" * 10**6 + "]" * 10**6 + "}",
        '{"version":1,"user":[' + "[]," * 1_100_000 + "1]}",
        json.dumps({"version": 1, "tied": {LONG: LONG}}),
        json.dumps({"version": LONG}),
        json.dumps({LONG: 1, "version": 1, "tensors": {"w": {**W, "dtype": LONG}}}),
        json.dumps({"version": 1, "tensors": {"w": {**W, "codec": LONG}}}),
    ],
    ids=["ties", "inputs", "repeated", "digits", "number", "deep", "nested", "tie", "version", "dtype", "codec"],
)
def test_metadata_of_any_length_is_refused_in_little_time_and_few_words(tmp_path: Path, text: str) -> None:
    path = forged(tmp_path / "x.safetensors", ROWS, text=text)
    began = time.process_time()
    refused(path)
    assert time.process_time() - began < 3  # linear: a quadratic reader takes minutes


@pytest.mark.parametrize("repeated", ["first", "last"])
def test_a_header_of_many_repeated_names_is_refused_in_little_time(tmp_path: Path, repeated: str) -> None:
    names = [f"n{i // 2}" for i in range(COUNT)] if repeated == "first" else [*map(str, range(COUNT)), "0"]
    path = raw(tmp_path / "x.safetensors", ("{" + ",".join(f'"{name}":{ENTRY}' for name in names) + "}").encode())
    began = time.process_time()
    refused(path, "is used twice")
    assert time.process_time() - began < 3


def test_a_pipe_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.safetensors")
    refused(tmp_path / "x.safetensors", "is not a regular file")


def test_a_path_that_is_not_there_is_a_file_not_found(tmp_path: Path) -> None:
    refused(tmp_path / "x.safetensors", "no such file or folder", error=MissingFileError)
    with pytest.raises(FileNotFoundError):
        load_state(tmp_path / "x.safetensors")


# -- narrowcast's part ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tensors": {"w": {**W, "codec": "int8"}}}, "described as 'int8' of shape [2, 64]"),
        ({"tensors": {"w": {**W, "codec": "int99"}}}, "has an invalid codec"),
        ({"tensors": {"w": {**W, "codec": {"name": "int4", "block": [1]}}}}, "has an invalid codec"),
        ({"tensors": {"w": {**W, "codec": None}}}, "has an invalid codec"),
        ({"tensors": {"w": {**W, "codec": 3}}}, "has an invalid codec"),
        ({"tensors": {"w": {**W, "codec": "int4:block=" + "9" * 5000}}}, "has an invalid codec"),
        ({"tensors": {"w": {**W, "codec": {"name": "levels", "table": [0.5] * 10**5}}}}, "has an invalid codec"),
        ({"tensors": {"w": {**W, "codec": {"name": "levels", "table": [0, 1e400]}}}}, "has an invalid codec"),
        ({"tensors": {"w": {**W, "shape": [2, 100]}}}, "described as 'int4' of shape [2, 100]"),
        ({"tensors": {"w": {**W, "shape": [3, 64]}}}, "the file holds U8 [2, 48]"),
        ({"tensors": {"w": {**W, "shape": [2]}}}, "the file holds U8 [2, 48]"),
        ({"tensors": {"w": {**W, "shape": [2, 1 << 62, 2]}}}, "product is below 2**63"),
        ({"tensors": {"w": {**W, "shape": [2, 1 << 61]}}}, "described as 'int4'"),
        ({"tensors": {"w": {**W, "shape": [2, -64]}}}, "product is below 2**63"),
        ({"tensors": {"w": {**W, "shape": [2, 64.0]}}}, "product is below 2**63"),
        ({"tensors": {"w": {**W, "shape": [True, 64]}}}, "product is below 2**63"),
        ({"tensors": {"w": {**W, "shape": "2x64"}}}, "product is below 2**63"),
        ({"tensors": {"w": {**W, "shape": [1] * 64}}}, "described as 'int4'"),
        ({"tensors": {"w": {**W, "shape": [1] * 65}}}, "'w' has 65 dimensions, and a tensor has at most 64"),
        ({"tensors": {"w": {**W, "shape": [1 << 62] * 100_000}}}, "'w' has 100000 dimensions"),
        ({"tensors": {"w": {**W, "dtype": "int8"}}}, "had the dtype 'int8'"),
        ({"tensors": {"w": {**W, "dtype": ["float32"]}}}, "had the dtype ['float32']"),
        ({"tensors": {"w": "int4"}}, "the description of 'w' is a str, not an object"),
        ({"tensors": {"v": W}}, "'v' is described as 'int4' of shape [2, 64], but the file holds nothing of that name"),
        ({"tensors": []}, "tensors is a list, not an object"),
        ({"checksums": {}}, "every tensor needs one checksum; ['w'] is missing"),
        ({"checksums": {"w": 3}}, "every tensor needs one checksum"),
        ({"checksums": {"w": "00000000"}}, "the bytes of 'w' do not match their checksum '00000000'"),
        ({"tied": {"a": "b", "b": "a"}}, "'a' is tied to 'b'"),
        ({"tied": {"a": "a"}}, "'a' is tied to 'a'"),
        ({"tied": {"w": "w"}}, "'w' is tied to 'w'"),
        ({"tied": {"a": ["w"]}}, "'a' is tied to ['w']"),
        ({"tied": {"a": "b", "b": "w"}}, "'a' is tied to 'b'"),
        ({"user": 3}, "user is a int, not an object"),
        ({"version": 0}, "version=0 is not a version"),
        ({"version": "1"}, "version='1' is not a version"),
        ({"version": True}, "version=True is not a version"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_metadata_that_lies_is_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    refused(forged(tmp_path / "x.safetensors", ROWS, **changes), words)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "[" * 100_000, '{"version": 1, "version": 1}', "1" * 5000])
def test_metadata_that_is_no_object_is_refused(tmp_path: Path, text: str) -> None:
    refused(forged(tmp_path / "x.safetensors", ROWS, text=text))


def test_a_newer_version_is_refused_with_the_command_that_helps(tmp_path: Path) -> None:
    path = forged(tmp_path / "x.safetensors", ROWS, version=2, tensors={"w": {"something": "new"}})
    refused(path, "version 2", "reads versions up to 1", "pip install --upgrade narrowcast", error=NewerVersionError)


def test_a_description_that_does_not_match_its_seal_is_refused(tmp_path: Path) -> None:
    entries, data = plain(ROWS)
    text = json.dumps(about(ROWS, tensors={"w": W}))
    both = {"narrowcast": text, "narrowcast.crc32": seal(ROWS, text)}
    refused(
        raw(tmp_path / "x.safetensors", {"__metadata__": {**both, "narrowcast.crc32": "0" * 8}, **entries}, data),
        "does not match its own checksum",
    )
    for key in both:
        one = raw(tmp_path / "y.safetensors", {"__metadata__": {key: both[key]}, **entries}, data)
        refused(one, "only one of 'narrowcast' and 'narrowcast.crc32'")
    as_signed = {"w": {**entries["w"], "dtype": "I8"}}
    refused(raw(tmp_path / "z.safetensors", {"__metadata__": both, **as_signed}, data), "its own checksum")


def test_verify_false_takes_bytes_as_they_are(tmp_path: Path) -> None:
    path = forged(tmp_path / "x.safetensors", ROWS, checksums={"w": "00000000"})
    assert isinstance(load_state(path, verify=False)["w"], torch.Tensor)


# -- folders ----------------------------------------------------------------------------------------------------------


def folder(path: Path) -> Path:
    save_state({"a": torch.ones(4), "b": torch.ones(4)}, path, max_shard_size=16)
    return path


def rewrite(folder: Path, change: dict[str, Any]) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"].update(change)
    path.write_text(json.dumps(index))


@pytest.mark.parametrize(
    "place",
    ["../x.safetensors", "/etc/passwd", "sub/x.safetensors", "..", "", ".", "a\\b", "x\0y", 3, None, ["a"], "a/../b"],
    ids=repr,
)
def test_an_index_names_files_of_its_own_folder_only(tmp_path: Path, place: object) -> None:
    (tmp_path / "x.safetensors").write_bytes(b"secret")
    path = folder(tmp_path / "model")
    rewrite(path, {"a": place})
    with pytest.raises(CheckpointError) as caught:
        load_state(path)
    assert "secret" not in str(caught.value)
    assert "only name files of its own folder" in str(caught.value) or "not a regular file" in str(caught.value)


def test_a_symlink_in_the_folder_is_followed_as_the_cache_of_hugging_face_needs(tmp_path: Path) -> None:
    path = folder(tmp_path / "model")
    shard = path / "model-00001-of-00002.safetensors"
    shard.rename(tmp_path / "blob")
    shard.symlink_to(tmp_path / "blob")
    assert load_state(path).keys() == {"a", "b"}


def test_a_shard_that_is_missing_is_named(tmp_path: Path) -> None:
    path = folder(tmp_path / "model")
    (path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(MissingFileError, match=r"model-00002-of-00002.safetensors: no such file, although the index"):
        load_state(path)


@pytest.mark.parametrize(
    "change", [{"a": "model-00002-of-00002.safetensors"}, {"c": "model-00001-of-00002.safetensors"}]
)
def test_an_index_that_does_not_match_its_files_is_refused(tmp_path: Path, change: dict[str, str]) -> None:
    path = folder(tmp_path / "model")
    rewrite(path, change)
    with pytest.raises(CheckpointError, match="Index and files are of different saves"):
        load_state(path)


def test_a_key_that_two_files_hold_is_refused(tmp_path: Path) -> None:
    path = folder(tmp_path / "model")
    save_state({"a": torch.ones(4), "b": torch.zeros(4)}, path / "model-00002-of-00002.safetensors")
    with pytest.raises(CheckpointError, match=r"'a' is in model-00002-of-00002.safetensors and in another file"):
        load_state(path)


def test_a_key_that_a_file_holds_but_the_index_does_not_list_is_refused(tmp_path: Path) -> None:
    path = folder(tmp_path / "model")
    save_state({"b": torch.ones(4), "extra": torch.zeros(4)}, path / "model-00002-of-00002.safetensors")
    with pytest.raises(CheckpointError, match=r"lists 'extra' in no file, but model-00002.* holds it"):
        load_state(path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": {}}', '{"weight_map": []}', "[" * 100_000, "\xff"])
def test_an_index_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    path = folder(tmp_path / "model")
    (path / "model.safetensors.index.json").write_text(text, "latin-1")
    with pytest.raises(CheckpointError, match=r"model.safetensors.index.json: "):
        load_state(path)


def test_a_folder_without_safetensors_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps({}))
    refused(tmp_path, "holds no safetensors file", "Pickles are not read", error=MissingFileError)


# -- any byte ---------------------------------------------------------------------------------------------------------


def small(path: Path) -> dict[str, torch.Tensor | EncodedRows]:
    state: dict[str, torch.Tensor | EncodedRows] = {
        "rows": encode_rows(torch.arange(40.0).view(2, 20), "int4:block=8"),
        "x": torch.arange(6.0).bfloat16(),
        "empty": torch.empty(0, 3),
        "n": torch.arange(3),
    }
    save_state({**state, "tied": state["x"]}, path, metadata={"step": 1})
    return {**state, "tied": state["x"]}


def same(found: dict[str, Any], wanted: dict[str, Any]) -> bool:
    def facts(value: Any) -> Any:
        if isinstance(value, EncodedRows):
            return (value.codec, value.shape, value.dtype, value.data.tolist())
        return (value.dtype, value.shape, value.tolist())

    return {name: facts(value) for name, value in found.items()} == {k: facts(v) for k, v in wanted.items()}


def test_a_flipped_bit_in_any_byte_is_an_error_or_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    wanted = small(path)
    good = path.read_bytes()
    harmless = 0
    for place in range(len(good)):
        for bit in {place % 8, (place + 3) % 8, (place + 5) % 8}:
            path.write_bytes(good[:place] + bytes([good[place] ^ (1 << bit)]) + good[place + 1 :])
            try:
                found = load_state(path)
            except CheckpointError:
                continue
            harmless += 1
            assert same(found, wanted), (place, bit)
    assert harmless < 50  # "format": "pt", and spaces that become other white space


def test_any_cut_or_padding_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    small(path)
    good = path.read_bytes()
    for length in [*range(0, len(good), 7), len(good) - 1]:
        path.write_bytes(good[:length])
        refused(path, "not a whole safetensors file")
    path.write_bytes(good + b"\0")
    refused(path, "not a whole safetensors file")


def test_random_rubbish_in_random_places_is_an_error_or_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    wanted = small(path)
    good = path.read_bytes()
    chosen = random.Random(1)
    for _ in range(500):
        start = chosen.randrange(len(good))
        count = chosen.choice([1, 2, 8, 40])
        path.write_bytes(good[:start] + chosen.randbytes(count) + good[start + count :])
        try:
            found = load_state(path)
        except CheckpointError:
            continue
        assert same(found, wanted), (start, count)


def test_a_file_that_claims_to_be_huge_takes_no_memory(tmp_path: Path) -> None:
    # 1 TB by its header, by its sizes, and as a sparse file: none of it may be allocated before it is refused.
    claims = {"x": entry(shape=[1 << 38], data_offsets=[0, 1 << 40])}
    raw(tmp_path / "a.safetensors", claims, bytes(8))
    (tmp_path / "b.safetensors").write_bytes((1 << 40).to_bytes(8, "little") + b"{}")
    with open(tmp_path / "c.safetensors", "wb") as file:
        file.write((1 << 39).to_bytes(8, "little"))
        file.truncate(1 << 40)
    forged(tmp_path / "d.safetensors", ROWS, tensors={"w": {**W, "shape": [2, 1 << 40]}})
    code = (
        "import sys\n"
        "from narrowcast.checkpoint import load_state; from narrowcast.errors import CheckpointError\n"
        "import safetensors, torch; load_state(sys.argv[1])\n"
        "def peak(): return int(open('/proc/self/status').read().split('VmHWM:')[1].split()[0])\n"
        "before = peak()\n"
        "for path in sys.argv[2:]:\n"
        "    try: load_state(path); raise SystemExit('loaded ' + path)\n"
        "    except CheckpointError: pass\n"
        "print(peak() - before)"
    )
    save_state({"x": torch.ones(4)}, tmp_path / "good.safetensors")
    paths = [str(tmp_path / f"{name}.safetensors") for name in ("good", "a", "b", "c", "d")]
    done = subprocess.run([sys.executable, "-c", code, *paths], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 16 * 1024  # KB: each claim is at least 60,000 times that


def test_reading_checks_headers_and_leaves_the_bytes_to_verify(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    small(path)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    found = read(path)
    with pytest.raises(CheckpointError, match="do not match their checksum"):
        found.verify()
