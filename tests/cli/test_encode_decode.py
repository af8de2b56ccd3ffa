"""`narrowcast encode` and `decode`: the bytes of narrowcast.encode, and files that are whole or not there."""

from __future__ import annotations

import functools
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor
from typer.testing import CliRunner

import narrowcast as nc
from narrowcast.checkpoint import read
from narrowcast.cli import app
from narrowcast.codecs.payload import encode_rows


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def run(*words: object) -> dict[str, Any]:
    result = CliRunner().invoke(app, [*map(str, words), "--json"])
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def refused(*words: object) -> str:
    before = sorted(os.listdir())
    result = CliRunner().invoke(app, [*map(str, words)])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert sorted(os.listdir()) == before
    return result.stderr


def stored(path: str, name: str) -> Tensor:
    """The bytes of a payload in a file."""
    return read(path).tensor(name).flatten()


# -- there and back ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["raw", "int8", "int4:block=64", "int3", "nf4", "sign", "int8:block=row"])
@pytest.mark.parametrize("shape", [(), (0,), (1,), (1000,), (3, 130), (2, 3, 70), (0, 5), (5, 0)])
def test_the_bytes_are_those_of_encode_and_come_back_in_their_shape(codec: str, shape: tuple[int, ...]) -> None:
    x = random(*shape)
    np.save("x.npy", x.numpy())
    run("encode", "x.npy", "x.safetensors", "--codec", codec)
    payload = nc.encode(x, codec)
    assert torch.equal(stored("x.safetensors", "array"), payload.data)
    run("decode", "x.safetensors", "y.npy")
    found = np.load("y.npy")
    assert (found.dtype, found.shape) == (np.float32, shape)
    assert torch.equal(torch.from_numpy(found), nc.decode(payload))


@pytest.mark.parametrize("dtype", ["float16", "float64", ">f4"])
def test_arrays_keep_their_precision_and_lose_their_byte_order(dtype: str) -> None:
    x = random(500).numpy().astype(dtype)
    np.save("x.npy", x)
    np.save("turned.npy", np.asfortranarray(x.reshape(25, 20)))
    run("encode", "x.npy", "x.safetensors")
    run("encode", "turned.npy", "turned.safetensors")
    run("decode", "x.safetensors", "y.npy")
    found = np.load("y.npy")
    assert found.dtype == np.dtype(dtype).newbyteorder("=")
    assert np.array_equal(found, nc.decode(nc.encode(torch.from_numpy(x.astype(found.dtype)), "int8")).numpy())
    assert torch.equal(stored("turned.safetensors", "array"), stored("x.safetensors", "array"))


def test_floats_of_a_safetensors_file_are_encoded_and_the_rest_is_copied() -> None:
    state = {
        "weight": random(16, 100).bfloat16(),
        "bias": random(16),
        "scale": random(),
        "ids": torch.arange(7),
        "small": random(4).to(torch.float8_e4m3fn),
    }
    safetensors.torch.save_file(state, "x.safetensors")
    found = run("encode", "x.safetensors", "y.safetensors", "--codec", "int4")
    assert sorted(found["copied"]) == ["ids", "small"]
    assert found["bytes_before"] == sum(tensor.nbytes for tensor in state.values())
    sizes = {tensor["name"]: tensor["bytes_after"] for tensor in found["tensors"]}
    assert sizes == {name: nc.encode(state[name], "int4").nbytes for name in ("weight", "bias", "scale")}
    assert found["bytes_after"] == sum(sizes.values()) + state["ids"].nbytes + state["small"].nbytes

    run("decode", "y.safetensors", "z.safetensors")
    back = safetensors.torch.load_file("z.safetensors")
    assert back.keys() == state.keys()
    for name, tensor in state.items():
        wanted = nc.decode(nc.encode(tensor, "int4")) if name in sizes else tensor
        assert (back[name].dtype, back[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(back[name].flatten().view(torch.uint8), wanted.flatten().view(torch.uint8)), name
    assert read("z.safetensors").user == {}


def test_a_seed_chooses_the_draws_of_a_stochastic_codec() -> None:
    x = random(1000)
    np.save("x.npy", x.numpy())
    for seed in (0, 5):
        run("encode", "x.npy", f"{seed}.safetensors", "--codec", "int4:stochastic=true", "--seed", seed)
        wanted = nc.encode(x, "int4:stochastic=true", seed=seed).data
        assert torch.equal(stored(f"{seed}.safetensors", "array"), wanted)
    assert not torch.equal(stored("0.safetensors", "array"), stored("5.safetensors", "array"))


def test_tied_tensors_and_metadata_go_along() -> None:
    x = random(8, 64)
    nc.save({"a": x, "b": x}, "x.safetensors", metadata={"step": 7})
    run("encode", "x.safetensors", "y.safetensors")
    assert read("y.safetensors").tied == {"b": "a"}
    run("decode", "y.safetensors", "z.safetensors")
    found = read("z.safetensors")
    assert (found.tied, found.user) == ({"b": "a"}, {"step": 7})
    run("decode", "y.safetensors", "b.npy", "--name", "b")
    assert np.array_equal(np.load("b.npy"), nc.decode(nc.encode(x, "int8")).numpy())


def test_decode_takes_what_save_and_quantize_have_written() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 8), torch.nn.Linear(8, 3))
    nc.quantize_(model, "int4:block=32", rules={"1": None})
    nc.save(model, "x.safetensors")
    found = run("decode", "x.safetensors", "y.safetensors")
    codecs = {tensor["name"]: tensor["codec"] for tensor in found["tensors"]}
    assert codecs == {"0.weight": "int4:block=32", "0.bias": None, "1.weight": None, "1.bias": None}
    back = safetensors.torch.load_file("y.safetensors")
    assert torch.equal(back["0.weight"], model[0].decoded())
    assert torch.equal(back["1.weight"], model[1].weight)


def test_one_tensor_can_be_picked_and_its_dtype_chosen() -> None:
    x = random(20, 30).bfloat16()
    nc.save({"a.weight": x, "b.weight": random(3)}, "x.safetensors")
    run("encode", "x.safetensors", "y.safetensors")
    run("decode", "y.safetensors", "a.npy", "--name", "a.weight", "--dtype", "float32")
    wanted = nc.decode(nc.encode(x, "int8"), dtype=torch.float32)
    assert np.array_equal(np.load("a.npy"), wanted.numpy())
    said = refused("decode", "y.safetensors", "b.npy", "--name", "c.weight")
    assert said == "error: --name 'c.weight': SRC has no tensor of that name. It has: b.weight, a.weight.\n"


def test_what_is_not_finite_is_said() -> None:
    x = random(100)
    x[3] = math.nan
    np.save("x.npy", x.numpy())
    result = CliRunner().invoke(app, ["encode", "x.npy", "x.safetensors"])
    assert result.stdout.splitlines() == [
        "x.safetensors: 1 encoded in int8; 400 -> 112 bytes, 28.0%",
        "array holds a NaN or an infinity: blocks that hold one decode to NaN.",
    ]


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("array", "said"),
    [
        (np.arange(5), "holds int64, and codecs take float16, float32, float64."),
        (np.zeros(5, "V2"), "The usual cause is bfloat16, which .npy has no name for."),
        (np.array([{}], dtype=object), "Python objects, which are not read"),
        (np.zeros(3, "c8"), "holds complex64"),
        (np.zeros(3, [("a", "f4")]), "codecs take float16"),
    ],
)
def test_arrays_that_codecs_do_not_take_are_refused(array: Any, said: str) -> None:
    np.save("x.npy", array)
    assert said in refused("encode", "x.npy", "x.safetensors")


def test_files_of_the_wrong_kind_are_refused() -> None:
    np.save("x.npy", random(100).numpy())
    Path("cut.npy").write_bytes(Path("x.npy").read_bytes()[:150])
    Path("text.npy").write_text("hello")
    Path("none.npy").write_bytes(b"")
    Path("x.bin").write_bytes(b"hello")
    Path("bad.safetensors").write_bytes(b"hello")
    Path("sub").mkdir()
    assert "not a whole .npy file" in refused("encode", "cut.npy", "y.safetensors")
    assert "not a whole .npy file" in refused("encode", "text.npy", "y.safetensors")
    assert "not a whole .npy file" in refused("encode", "none.npy", "y.safetensors")
    assert "not a whole safetensors file" in refused("encode", "bad.safetensors", "y.safetensors")
    assert "not a whole safetensors file" in refused("decode", "bad.safetensors", "y.npy")
    assert "expected a file that ends in .npy or .safetensors" in refused("encode", "x.bin", "y.safetensors")
    assert "expected a file that ends in .safetensors" in refused("decode", "x.npy", "y.npy")
    assert "is a folder" in refused("encode", "sub", "y.safetensors")
    assert "DST='y.npy': the name of the file to write must end in .safetensors" in refused("encode", "x.npy", "y.npy")
    assert "there is no folder 'no'" in refused("encode", "x.npy", "no/y.safetensors")


def test_targets_that_are_taken_are_refused_unless_asked() -> None:
    np.save("x.npy", random(100).numpy())
    run("encode", "x.npy", "y.safetensors")
    before = Path("y.safetensors").read_bytes()
    assert "exists already. Pass --overwrite" in refused("encode", "x.npy", "y.safetensors", "--codec", "int4")
    assert Path("y.safetensors").read_bytes() == before
    run("encode", "x.npy", "y.safetensors", "--codec", "int4", "--overwrite")
    assert read("y.safetensors").encodings["array"].codec.spec == "int4"
    assert "is the source" in refused("decode", "y.safetensors", "y.safetensors", "--overwrite")
    assert "1 of its tensors are encoded already" in refused("encode", "y.safetensors", "z.safetensors")


def test_decoding_into_npy_needs_one_array_of_a_dtype_that_it_knows() -> None:
    nc.save({"a": random(3).bfloat16(), "b": random(3)}, "x.safetensors")
    assert "holds one array, and SRC has 2 tensors" in refused("decode", "x.safetensors", "y.npy")
    said = refused("decode", "x.safetensors", "y.npy", "--name", "a")
    assert said == (
        "error: 'a' is bfloat16, which .npy has no name for. Add --dtype float32, or write a .safetensors file.\n"
    )
    assert "--dtype 'int8': is none of" in refused("decode", "x.safetensors", "y.npy", "--dtype", "int8")


def test_bytes_that_changed_on_the_disk_are_refused() -> None:
    np.save("x.npy", random(100).numpy())
    run("encode", "x.npy", "y.safetensors")
    data = bytearray(Path("y.safetensors").read_bytes())
    data[-100] ^= 1
    Path("y.safetensors").write_bytes(data)
    assert "do not match their checksum" in refused("decode", "y.safetensors", "y.npy")


@pytest.mark.parametrize("shape", [[7], "seven", [10, 10], [100, 1, 1], {}, [-100]])
def test_a_shape_that_does_not_fit_the_bytes_is_refused(shape: object) -> None:
    rows = encode_rows(random(1, 100), "int8")
    nc.save({"array": rows}, "x.safetensors", metadata={"encoded_shapes": {"array": shape}})
    assert "in the metadata says that 'array' had the shape" in refused("decode", "x.safetensors", "y.npy")


# -- cut off ----------------------------------------------------------------------------------------------------------


def test_ctrl_c_leaves_nothing_half_written(folder: Path) -> None:
    # 512 MB of zeros that take no room on the disk.
    np.lib.format.open_memmap("x.npy", "w+", "float32", (1 << 27,)).flush()
    words = ["encode", "x.npy", "y.safetensors", "--codec", "int8:stochastic=true"]
    command = [sys.executable, "-m", "narrowcast.cli", *words]
    environment = {**os.environ, "PYTHONPATH": str(Path(nc.__file__).parent.parent)}
    listens = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # jobs of some shells start without it
    options = {"stderr": subprocess.PIPE, "text": True, "env": environment, "preexec_fn": listens}
    with subprocess.Popen(command, **options) as process:
        deadline = time.monotonic() + 60
        while not [*folder.glob(".*")] and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.005)
        assert [*folder.glob(".y.safetensors.*")]
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors == "error: stopped.\n"
    assert os.listdir() == ["x.npy"]
