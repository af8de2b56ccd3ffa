"""State dicts through files: what comes back, what a file says, and what stands where when something fails."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
import safetensors.torch
import torch
from forge import forged

import narrowcast as nc
from cases import mixed, same_bits
from narrowcast import Codec
from narrowcast.checkpoint import files, load_state, read, save_state
from narrowcast.checkpoint.files import Staging
from narrowcast.checkpoint.header import NAMES
from narrowcast.checkpoint.saving import size_in_bytes
from narrowcast.codecs.payload import EncodedRows, encode_rows
from narrowcast.errors import CheckpointError


def state() -> dict[str, torch.Tensor | EncodedRows]:
    weight = torch.arange(12.0).view(3, 4)
    return {
        "plain": weight,
        "tied": weight,
        "rows": encode_rows(mixed(4 * 100).view(4, 100), "int4"),
        "counts": torch.arange(6, dtype=torch.int64),
        "flag": torch.tensor(True),
    }


def assert_same(found: dict[str, torch.Tensor | EncodedRows], wanted: dict[str, torch.Tensor | EncodedRows]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        other = found[name]
        if isinstance(value, EncodedRows):
            assert isinstance(other, EncodedRows)
            assert (other.codec, other.shape, other.dtype) == (value.codec, value.shape, value.dtype)
            assert torch.equal(other.data, value.data)
        else:
            assert isinstance(other, torch.Tensor)
            assert other.dtype == value.dtype
            assert same_bits(other, value) if value.is_floating_point() else torch.equal(other, value)


# -- there and back ---------------------------------------------------------------------------------------------------


def test_a_state_dict_comes_back_from_a_file(tmp_path: Path) -> None:
    save_state(state(), tmp_path / "x.safetensors")
    found = load_state(tmp_path / "x.safetensors")
    assert_same(found, state())
    assert found["tied"] is found["plain"]


@pytest.mark.parametrize("limit", [1, 60, 300, "1kB", "5GB"])
def test_a_state_dict_comes_back_from_a_folder_of_files_of_any_size(tmp_path: Path, limit: int | str) -> None:
    save_state(state(), tmp_path / "folder", max_shard_size=limit)
    assert_same(load_state(tmp_path / "folder"), state())


def test_every_codec_comes_back(tmp_path: Path, codec: Codec) -> None:
    rows = encode_rows(mixed(3 * 70).view(3, 70), codec)
    save_state({"w": rows}, tmp_path / "x.safetensors")
    found = load_state(tmp_path / "x.safetensors")["w"]
    assert isinstance(found, EncodedRows)
    assert found.codec == codec
    assert same_bits(found.decode(), rows.decode())


@pytest.mark.parametrize("dtype", NAMES, ids=str)
def test_every_dtype_of_safetensors_comes_back(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = torch.arange(64, dtype=torch.uint8).view(4, 16)
    tensor = (tensor % 2).bool() if dtype == torch.bool else tensor.view(dtype)
    save_state({"x": tensor}, tmp_path / "x.safetensors")
    found = load_state(tmp_path / "x.safetensors")["x"]
    assert isinstance(found, torch.Tensor)
    assert found.dtype == dtype
    assert torch.equal(found.view(torch.uint8), tensor.view(torch.uint8))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12.0).view(3, 4).t(),
        torch.arange(12.0)[::5],
        torch.tensor(2.5).expand(3, 2),
        torch.empty(0, 7),
        torch.tensor(1.5),
        torch.tensor([1 + 2j, 3 - 4j]).to(torch.complex64).conj(),
        torch.tensor([1 + 2j]).to(torch.complex64).conj().imag,
        torch.nn.Parameter(torch.ones(2)),
        torch.ones(2, requires_grad=True) * 2,
    ],
    ids=["transposed", "strided", "expanded", "empty", "scalar", "conjugate", "negative", "parameter", "graph"],
)
def test_tensors_of_any_layout_come_back_as_they_read(tmp_path: Path, tensor: torch.Tensor) -> None:
    save_state({"x": tensor}, tmp_path / "x.safetensors")
    found = load_state(tmp_path / "x.safetensors")["x"]
    assert isinstance(found, torch.Tensor)
    assert found.shape == tensor.shape
    assert torch.equal(found, tensor.detach())


def test_a_tensor_goes_to_the_device_that_is_asked_for(tmp_path: Path, device: str) -> None:
    original = {"x": torch.ones(3, device=device), "rows": encode_rows(torch.ones(2, 64, device=device), "int8")}
    save_state(original, tmp_path / "x.safetensors")
    found = load_state(tmp_path / "x.safetensors", device=device)
    assert isinstance(found["x"], torch.Tensor)
    assert isinstance(found["rows"], EncodedRows)
    assert found["x"].device.type == found["rows"].data.device.type == device
    assert torch.equal(found["x"], original["x"])


def test_loading_maps_the_file_and_changes_do_not_reach_it(tmp_path: Path) -> None:
    save_state({"x": torch.zeros(1000)}, tmp_path / "x.safetensors")
    found = load_state(tmp_path / "x.safetensors")["x"]
    assert isinstance(found, torch.Tensor)
    assert str(tmp_path / "x.safetensors") in Path("/proc/self/maps").read_text()
    found.fill_(1)
    assert_same(load_state(tmp_path / "x.safetensors"), {"x": torch.zeros(1000)})


# -- what a file says -------------------------------------------------------------------------------------------------


def test_the_bytes_of_a_file_are_those_that_the_page_describes(tmp_path: Path) -> None:
    rows = nc.codec("int4").encode(torch.ones(1, 8), 0)
    tensors = {"w": ("U8", [1, 16], bytes(rows.view(-1).tolist())), "b": ("F32", [1], b"\0\0\x80?")}
    described = {"w": {"codec": "int4", "shape": [1, 8], "dtype": "bfloat16"}}
    path = forged(tmp_path / "forged.safetensors", tensors, tensors=described, tied={"v": "w"}, user={"step": 3})
    found = read(path)
    found.verify()
    assert (found.tied, found.user) == ({"v": "w"}, {"step": 3})
    state = load_state(path)
    assert_same(state, {"w": encode_rows(torch.ones(1, 8).bfloat16(), "int4"), "b": torch.ones(1), "v": state["w"]})
    # And the other way: what save writes has the same header, byte for byte but for spaces.
    save_state(state, tmp_path / "saved.safetensors", metadata={"step": 3})
    with safetensors.safe_open(tmp_path / "saved.safetensors", "pt") as file, safetensors.safe_open(path, "pt") as hand:
        assert file.metadata() == hand.metadata()


def test_safetensors_alone_reads_the_file(tmp_path: Path) -> None:
    original = state()
    save_state(original, tmp_path / "x.safetensors")
    found = safetensors.torch.load_file(tmp_path / "x.safetensors")
    rows, plain = original["rows"], original["plain"]
    assert isinstance(rows, EncodedRows)
    assert isinstance(plain, torch.Tensor)
    assert found.keys() == {"plain", "rows", "counts", "flag"}
    assert torch.equal(found["rows"], rows.data)
    assert torch.equal(found["plain"], plain)


def test_a_file_that_safetensors_wrote_loads(tmp_path: Path) -> None:
    safetensors.torch.save_file({"x": torch.ones(3)}, tmp_path / "x.safetensors", {"anything": "else"})
    assert_same(load_state(tmp_path / "x.safetensors"), {"x": torch.ones(3)})


def test_tensors_begin_at_multiples_of_their_elements_and_rows_at_multiples_of_16(tmp_path: Path) -> None:
    odd = {f"x{i}": torch.zeros(3, dtype=dtype) for i, dtype in enumerate(NAMES)}
    save_state({**odd, "rows": encode_rows(torch.ones(3, 5), "int3")}, tmp_path / "x.safetensors")
    for name, value in load_state(tmp_path / "x.safetensors").items():
        tensor = value.data if isinstance(value, EncodedRows) else value
        assert tensor.data_ptr() % (16 if isinstance(value, EncodedRows) else tensor.itemsize) == 0, name


def test_metadata_comes_back(tmp_path: Path) -> None:
    said = {"step": 7, "notes": ["ä", {"deep": None}], "rate": 0.5}
    save_state({"x": torch.ones(1)}, tmp_path / "x.safetensors", metadata=said)
    assert read(tmp_path / "x.safetensors").user == said


def digest(path: Path) -> str:
    """SHA-256 of the header, its length included."""
    content = path.read_bytes()
    return hashlib.sha256(content[: 8 + int.from_bytes(content[:8], "little")]).hexdigest()


def test_the_index_is_hugging_faces_and_says_which_files_it_was_written_with(tmp_path: Path) -> None:
    save_state({"a": torch.ones(4), "b": torch.ones(4), "c": torch.ones(1)}, tmp_path, max_shard_size=20)
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert json.loads((tmp_path / "model.safetensors.index.json").read_text()) == {
        "metadata": {"total_size": 36, "narrowcast": {"headers": {name: digest(tmp_path / name) for name in names}}},
        "weight_map": {
            "a": "model-00001-of-00002.safetensors",
            "b": "model-00002-of-00002.safetensors",
            "c": "model-00002-of-00002.safetensors",
        },
    }


@pytest.mark.parametrize(
    ("text", "size"), [("5GB", 5 * 10**9), ("1.5 MB", 1500000), ("2GiB", 2 << 30), ("300", 300), (7, 7), ("3b", 3)]
)
def test_sizes_are_read(text: str | int, size: int) -> None:
    assert size_in_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "5 parsecs", 0, -3, 2.5, None, True], ids=repr)
def test_sizes_that_cannot_be_are_refused(text: object) -> None:
    with pytest.raises(CheckpointError, match=r'max_shard_size=.*such as "5GB"'):
        size_in_bytes(text)  # type: ignore[arg-type]


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"x": 3}, "'x' is a int, and files hold tensors"),
        ({"x": nc.encode(torch.ones(3), "int8")}, "'x' is a Payload, and files hold tensors and EncodedRows. Store"),
        ({"x": torch.ones(2, device="meta")}, "'x' is on the meta device and has no values"),
        ({"x": torch.ones(2).to_sparse()}, "'x' is torch.float32, torch.sparse_coo, which safetensors cannot store"),
        ({"x": torch.ones(2, dtype=torch.complex128)}, "'x' is torch.complex128"),
        ({3: torch.ones(2)}, "3 cannot be a tensor's name"),
        ({"__metadata__": torch.ones(2)}, "'__metadata__' cannot be a tensor's name"),
        ({"\ud800": torch.ones(2)}, "cannot be a tensor's name"),
        ([torch.ones(2)], "expected a model or a mapping of names to tensors, got list"),
    ],
    ids=str,
)
def test_what_a_file_cannot_hold_is_refused_by_name(tmp_path: Path, bad: object, words: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        save_state(bad, tmp_path / "x.safetensors")  # type: ignore[arg-type]
    assert words in str(caught.value)
    assert not [*tmp_path.iterdir()]


def test_a_tensor_that_only_its_package_can_store_is_refused(tmp_path: Path) -> None:
    class Sharded(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, *call: object) -> object:
            raise NotImplementedError

    with pytest.raises(CheckpointError, match="'x' is a Sharded, which only its own package can store"):
        save_state({"x": torch.ones(2).as_subclass(Sharded)}, tmp_path / "x.safetensors")


def test_tensors_that_share_some_memory_are_refused_and_neighbours_are_not(tmp_path: Path) -> None:
    base = torch.arange(10.0)
    with pytest.raises(CheckpointError, match=r"'b' and 'a' share memory.*state\['b'\].clone\(\)"):
        save_state({"a": base[:6], "b": base[4:]}, tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match="share memory"):
        save_state({"a": base.view(2, 5), "b": base}, tmp_path / "x.safetensors")
    apart = {"a": base[:5], "b": base[5:], "even": base.view(5, 2)[:, 0], "odd": base.view(5, 2)[:, 1]}
    save_state({"even": apart["even"], "odd": apart["odd"]}, tmp_path / "x.safetensors")
    save_state({"a": apart["a"], "b": apart["b"]}, tmp_path / "x.safetensors")
    assert_same(load_state(tmp_path / "x.safetensors"), {"a": apart["a"], "b": apart["b"]})


@pytest.mark.parametrize("bad", [{"x": torch.ones(1)}, {"x": {1, 2}}, ["list"]], ids=["tensor", "set", "list"])
def test_metadata_that_json_cannot_say_is_refused(tmp_path: Path, bad: object) -> None:
    with pytest.raises(CheckpointError, match="metadata: "):
        save_state({"x": torch.ones(1)}, tmp_path / "x.safetensors", metadata=bad)  # type: ignore[arg-type]


def test_metadata_that_makes_the_header_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "HEADER_LIMIT", 1000)
    with pytest.raises(CheckpointError, match=r"metadata: the header would take .* reads at most 1000"):
        save_state({"x": torch.ones(1)}, tmp_path / "x.safetensors", metadata={"long": "x" * 1000})
    assert not [*tmp_path.iterdir()]


# -- whole or not at all ----------------------------------------------------------------------------------------------


class Unready:
    """Fails when the writer comes to it, as a disk that is full or a user who presses Ctrl-C does."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.shape == (5,):
            raise self.error
        return tensor.detach()


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device"), MemoryError()])
@pytest.mark.parametrize("place", ["x.safetensors", "folder"])
def test_a_save_that_fails_half_way_leaves_the_old_checkpoint_and_no_litter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, place: str
) -> None:
    old = {"a": torch.zeros(4), "b": torch.zeros(5)}
    save_state(old, tmp_path / place, max_shard_size=16)
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.setattr("narrowcast.checkpoint.saving._on_cpu", Unready(error))
    with pytest.raises(type(error)):
        save_state({"a": torch.ones(4), "b": torch.ones(5)}, tmp_path / place, max_shard_size=16)
    assert sorted(tmp_path.rglob("*")) == before
    assert_same(load_state(tmp_path / place), old)


def test_saving_over_the_file_that_is_mapped_is_safe(tmp_path: Path) -> None:
    save_state(state(), tmp_path / "x.safetensors")
    mapped = load_state(tmp_path / "x.safetensors")
    save_state(mapped, tmp_path / "x.safetensors")
    assert_same(load_state(tmp_path / "x.safetensors"), state())
    assert_same(mapped, state())


@pytest.mark.parametrize("sizes", [("5GB", 16), (16, "5GB"), (16, 30), (30, 16)])
def test_a_folder_holds_nothing_of_the_checkpoint_before(tmp_path: Path, sizes: tuple[int | str, int | str]) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    save_state({f"old{i}": torch.zeros(4) for i in range(4)}, tmp_path, max_shard_size=sizes[0])
    new: dict[str, torch.Tensor | EncodedRows] = {f"new{i}": torch.ones(4) for i in range(3)}
    save_state(new, tmp_path, max_shard_size=sizes[1])
    assert_same(load_state(tmp_path), new)
    listed = {*json.loads(index.read_text())["weight_map"].values()} if (index := _index(tmp_path)).exists() else set()
    expected = {"tokenizer.json", *(listed | {index.name} if listed else {"model.safetensors"})}
    assert {path.name for path in tmp_path.iterdir()} == expected


def _index(folder: Path) -> Path:
    return folder / "model.safetensors.index.json"


def test_while_new_files_appear_the_old_checkpoint_loads_until_the_index_is_renamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old: dict[str, torch.Tensor | EncodedRows] = {"a": torch.zeros(4), "b": torch.zeros(4)}
    new: dict[str, torch.Tensor | EncodedRows] = {"a": torch.ones(4), "b": torch.ones(4)}
    save_state(old, tmp_path, max_shard_size=16)
    seen = []
    replace = os.replace

    def watched(source: Path, target: Path) -> None:
        seen.append(target.name)
        assert_same(load_state(tmp_path), old)
        replace(source, target)
        assert_same(load_state(tmp_path), new if target == _index(tmp_path) else old)

    monkeypatch.setattr(os, "replace", watched)
    save_state(new, tmp_path, max_shard_size=16)
    assert seen[-1] == "model.safetensors.index.json"
    assert len(seen) == 3


def test_an_error_of_the_system_names_the_file_that_was_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "no" / "x.safetensors"
    with pytest.raises(FileNotFoundError) as caught:
        nc.save({"x": torch.zeros(2)}, path)
    assert str(caught.value) == (
        f"{path}: cannot be written: No such file or directory. Create the folder, or check its permissions, or name "
        "another folder."
    )
    assert caught.value.errno == errno.ENOENT


def test_an_empty_path_is_not_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    nc.save({"weight": torch.ones(3)}, ".")
    for use in (lambda: nc.save({"weight": torch.zeros(3)}, ""), lambda: nc.load("")):
        with pytest.raises(CheckpointError, match="path='': names no file and no folder"):
            use()
    assert torch.equal(nc.load(".")["weight"], torch.ones(3))


@pytest.mark.parametrize("ending", [".pt", ".pth", ".bin", ".ckpt", ".PT"])
def test_the_name_of_a_pickle_is_refused_and_makes_no_folder(tmp_path: Path, ending: str) -> None:
    with pytest.raises(CheckpointError, match=r"not pickles\. Write '.*/ok\.safetensors' for a file, or '.*/ok' for a"):
        nc.save({"x": torch.zeros(2)}, tmp_path / f"ok{ending}")
    assert [*tmp_path.iterdir()] == []


def test_a_folder_that_is_there_may_be_called_anything(tmp_path: Path) -> None:
    (tmp_path / "epoch.ckpt").mkdir()
    nc.save({"x": torch.zeros(2)}, tmp_path / "epoch.ckpt")
    assert_same(load_state(tmp_path / "epoch.ckpt"), {"x": torch.zeros(2)})


def staged(folder: Path, work: Callable[[], object]) -> None:
    """A file called x, during whose writing something happens."""
    with Staging(folder) as staging:
        with staging.file("x"):
            work()
        staging.publish()


def test_a_disk_that_is_full_names_the_file_that_was_asked_for(tmp_path: Path) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(OSError, match=r"/x: cannot be written: No space left on device\. Free some disk") as caught:
        staged(tmp_path, Mock(side_effect=full))
    assert caught.value.errno == errno.ENOSPC
    assert [*tmp_path.iterdir()] == []


def test_a_name_that_became_a_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError, match=rf"^{tmp_path}/x: cannot be written: Is a directory\."):
        staged(tmp_path, (tmp_path / "x").mkdir)


def test_an_error_about_another_file_is_left_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"^\[Errno 2\] No such file or directory: 'nowhere'$"):
        staged(tmp_path, Path("nowhere").read_bytes)


def test_bytes_are_on_the_disk_before_a_file_has_its_name_and_the_name_is_before_save_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    fsync, replace = os.fsync, os.replace

    def watched_fsync(handle: int) -> None:
        calls.append(("fsync", Path(os.readlink(f"/proc/self/fd/{handle}")).suffix))
        fsync(handle)

    def watched_replace(source: Path, target: Path) -> None:
        calls.append(("replace", target.suffix))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(os, "replace", watched_replace)
    save_state({"x": torch.ones(1)}, tmp_path / "x.safetensors")
    assert calls == [("fsync", ".narrowcast-tmp"), ("replace", ".safetensors"), ("fsync", "")]


def test_a_folder_cannot_take_the_place_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("mine")
    with pytest.raises(CheckpointError, match=r"is a file. Name a folder, or a file that ends in .safetensors"):
        save_state({"x": torch.ones(1)}, tmp_path / "taken")
    assert (tmp_path / "taken").read_text() == "mine"
