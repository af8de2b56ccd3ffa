"""Codecs from outside the library: registered, then used like any other, also in files and in other processes."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import narrowcast as nc
from narrowcast.codecs import Levels, registry
from narrowcast.errors import CheckpointError, SpecError

FLOAT4 = """
from narrowcast.codecs import Levels

class Float4(Levels):
    options = ("block", "scale")

    def __init__(self, *, block=None, scale=None):
        table = [-6.0, -4.0, -3.0, -2.0, -1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
        super().__init__(table, block=block, scale=scale, name="own_fp4", given={})
"""


class Thirds(Levels):
    """Three levels."""

    options = ("block",)

    def __init__(self, *, block: int | None = None, top: float = 1.0) -> None:
        super().__init__([-top, 0.0, top / 3], block=block, name="thirds", given={})


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(registry, "_codecs", dict(registry._codecs))
    yield
    registry._remembered.cache_clear()


def test_a_registered_codec_goes_by_its_name_everywhere(tmp_path: Path) -> None:
    nc.register_codec("thirds", Thirds)
    assert "thirds" in nc.list_codecs()
    assert nc.codec("thirds:block=16") == Thirds(block=16) == nc.codec({"name": "thirds", "block": 16})
    assert pickle.loads(pickle.dumps(Thirds(block=16))) == Thirds(block=16)
    model = torch.nn.Linear(64, 32)
    nc.quantize_(model, "thirds")
    nc.save(model, tmp_path / "x.safetensors")
    again = nc.load(tmp_path / "x.safetensors", torch.nn.Linear(64, 32))
    x = torch.randn(2, 64)
    assert torch.equal(again(x), model(x))


def test_a_function_may_make_the_codec_and_its_arguments_are_the_options() -> None:
    def thirds(block: int = 8) -> Thirds:
        return Thirds(block=block)

    nc.register_codec("thirds", thirds)
    assert nc.codec("thirds").block == 8
    assert nc.codec("thirds:block=24").block == 24
    with pytest.raises(SpecError, match=r"top=2: codec 'thirds' takes block\."):
        nc.codec("thirds:top=2")
    nc.register_codec("needs_block", lambda block: Thirds(block=block))
    assert "needs_block" not in nc.list_codecs()


@pytest.mark.parametrize(
    ("name", "factory", "words"),
    [
        ("int4", Thirds, "name='int4': is a codec of narrowcast already"),
        ("levels", Thirds, "is a codec of narrowcast already"),
        ("has:colon", Thirds, "a word of letters, digits and _"),
        ("", Thirds, "a word of letters"),
        (4, Thirds, "a word of letters"),
        ("thirds", "int4", "expected a subclass of Codec, or a function"),
        ("thirds", Thirds(), "Pass the class itself"),
    ],
    ids=str,
)
def test_what_cannot_be_registered_is_refused(name: Any, factory: Any, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        nc.register_codec(name, factory)


def test_a_name_is_given_once_but_a_class_may_be_defined_again() -> None:
    nc.register_codec("thirds", Thirds)
    nc.register_codec("thirds", Thirds)
    with pytest.raises(SpecError, match=r"name='thirds': is Thirds of 'test_own_codecs' already"):
        nc.register_codec("thirds", lambda: Thirds())


def test_a_codec_that_calls_itself_otherwise_is_refused_when_it_is_made() -> None:
    nc.register_codec("other", Thirds)
    with pytest.raises(SpecError, match=r"makes a codec called 'thirds'.*name='other'"):
        nc.codec("other")
    nc.register_codec("nothing", lambda: None)
    with pytest.raises(SpecError, match="makes a NoneType"):
        nc.codec("nothing")


def test_a_codec_that_is_not_registered_computes_and_copies_but_is_not_saved(tmp_path: Path) -> None:
    model = torch.nn.Linear(64, 32)
    nc.quantize_(model, Thirds())
    twin = copy.deepcopy(model)
    assert torch.equal(twin(torch.ones(64)), model(torch.ones(64)))
    with pytest.raises(SpecError, match=r"narrowcast\.register_codec\('thirds', Thirds\)"):
        nc.save(model, tmp_path / "x.safetensors")
    assert not [*tmp_path.iterdir()]


def test_a_codec_that_borrows_a_name_is_not_saved_as_what_it_is_not(tmp_path: Path) -> None:
    impostor = Levels([-1.0, 0.0, 2.0], name="nf4", given={})
    with pytest.raises(SpecError, match="makes another codec than this Levels"):
        nc.save({"w": nc.codecs.payload.encode_rows(torch.randn(4, 64), impostor)}, tmp_path / "x.safetensors")
    nc.register_codec("thirds", Thirds)
    with pytest.raises(SpecError, match="options in its `given`"):
        nc.save({"w": nc.codecs.payload.encode_rows(torch.randn(4, 64), Thirds(top=2.0))}, tmp_path / "x.safetensors")
    assert not [*tmp_path.iterdir()]


# -- another process ---------------------------------------------------------------------------------------------------


def run(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONWARNINGS": "ignore"}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=folder, env=environment)


def test_another_process_is_told_which_module_to_import_and_reads_the_file_then(tmp_path: Path) -> None:
    (tmp_path / "own_package").mkdir()
    (tmp_path / "own_package" / "__init__.py").write_text("")
    (tmp_path / "own_package" / "float4.py").write_text(
        f"{FLOAT4}\nimport narrowcast\nnarrowcast.register_codec('own_fp4', Float4)\n"
    )
    wrote = run(
        tmp_path,
        "import torch, narrowcast as nc, own_package.float4; m = torch.nn.Linear(64, 8)\n"
        "nc.quantize_(m, 'own_fp4:block=32'); nc.save(m, 'x.safetensors'); print(m(torch.ones(64)).sum().item())",
    )
    assert wrote.returncode == 0, wrote.stderr
    with pytest.raises(CheckpointError) as caught:
        nc.load(tmp_path / "x.safetensors")
    assert "'own_fp4:block=32', which is not a codec of narrowcast" in str(caught.value)
    assert str(caught.value).endswith("import own_package.float4")
    read = run(
        tmp_path,
        "import torch, narrowcast as nc, own_package.float4\n"
        "print(nc.load('x.safetensors', torch.nn.Linear(64, 8))(torch.ones(64)).sum().item())",
    )
    assert (read.returncode, read.stdout) == (0, wrote.stdout), read.stderr


def test_a_codec_of_a_script_is_said_to_be_of_the_script(tmp_path: Path) -> None:
    wrote = run(
        tmp_path,
        f"{FLOAT4}\nimport torch, narrowcast as nc; nc.register_codec('own_fp4', Float4)\n"
        "m = torch.nn.Linear(64, 8); nc.quantize_(m, 'own_fp4'); nc.save(m, 'x.safetensors')",
    )
    assert wrote.returncode == 0, wrote.stderr
    with pytest.raises(CheckpointError, match=r"script that wrote the file.*register_codec\('own_fp4', \.\.\.\)"):
        nc.load(tmp_path / "x.safetensors")


def test_an_installed_package_that_declares_its_codec_needs_no_import(tmp_path: Path) -> None:
    (tmp_path / "declared.py").write_text(FLOAT4)
    about = tmp_path / "declared-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: declared\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[narrowcast.codecs]\nown_fp4 = declared:Float4\n")
    done = run(tmp_path, "import narrowcast as nc; print(nc.codec('own_fp4:block=32'), nc.list_codecs()[-1])")
    assert (done.returncode, done.stdout) == (0, "own_fp4:block=32 own_fp4\n"), done.stderr
