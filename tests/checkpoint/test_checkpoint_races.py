"""Processes that save and load in one folder at the same time, and that are killed: one save, whole, every time."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import narrowcast as nc
from narrowcast.checkpoint import load_state, read, reading, save_state
from narrowcast.errors import CheckpointError, ReplacedError

INDEX = "model.safetensors.index.json"

# Every tensor of a save has the number of the save in it, so that a mixture shows. Limits: shards, a file, more shards.
SAVE = """
import sys, itertools, torch
from narrowcast.checkpoint import save_state
folder, first, step, *limits = sys.argv[1:]
for number in itertools.count(int(first), int(step)):
    state = {f"w{i}": torch.full((4,), float(number)) for i in range(6)}
    save_state(state, folder, max_shard_size=int(limits[number % len(limits)]))
    print(number, flush=True)
"""
LOAD = """
import sys, torch
from narrowcast.checkpoint import load_state
folder, least_loads, least_saves = sys.argv[1], *map(int, sys.argv[2:])
loads, seen = 0, set()
while loads < least_loads or len(seen) < least_saves:
    numbers = {float(x) for tensor in load_state(folder, verify=loads % 2 == 0).values() for x in tensor}
    assert len(numbers) == 1, f"a mixture of saves {sorted(numbers)}"
    seen |= numbers
    loads += 1
"""


def start(code: str, *arguments: object) -> subprocess.Popen[str]:
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-c", code, *map(str, arguments)], **pipes)


def kill(*processes: subprocess.Popen[str]) -> None:
    for process in processes:
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=60)


def saved(folder: Path, number: float, limit: int = 16) -> None:
    save_state({f"w{i}": torch.full((4,), number) for i in range(6)}, folder, max_shard_size=limit)


def number_in(folder: Path) -> float:
    """The one number that all tensors of a folder hold; every checksum is compared."""
    state = load_state(folder)
    assert state.keys() == {f"w{i}" for i in range(6)}
    (number,) = {float(x) for tensor in state.values() for x in tensor}  # type: ignore[union-attr]
    return number


@pytest.mark.parametrize(
    ("first", "second"),
    [([16], None), ([16, 10**9], None), ([16, 32], None), ([16], [32]), ([16, 10**9], [32, 10**9, 16])],
    ids=["shards", "shards-file", "more-less", "two", "two-of-all-kinds"],
)
def test_a_reader_beside_savers_gets_one_save_every_time(
    tmp_path: Path, first: list[int], second: list[int] | None
) -> None:
    saved(tmp_path, -1.0)
    savers = [start(SAVE, tmp_path, 0, 2, *first)]
    savers += [start(SAVE, tmp_path, 1, 2, *second)] if second else []
    reader = start(LOAD, tmp_path, 100, 20)  # it ends after so many loads, of so many different saves
    try:
        _, errors = reader.communicate(timeout=240)
        assert reader.returncode == 0, errors
    finally:
        kill(*savers)
    # Both were killed wherever they were.
    assert number_in(tmp_path) >= 0
    # The next save cleans up: nothing is left but its own files and what killed processes were writing.
    saved(tmp_path, -2.0)
    assert number_in(tmp_path) == -2.0
    named = set(json.loads((tmp_path / INDEX).read_text())["weight_map"].values())
    assert {path.name for path in tmp_path.iterdir() if not path.name.startswith(".")} == {INDEX, *named}


@pytest.mark.parametrize("limits", [(16, 16), (10**9, 16), (16, 10**9)], ids=["shards", "from-file", "to-file"])
def test_a_saver_killed_anywhere_leaves_a_checkpoint_that_loads(tmp_path: Path, limits: tuple[int, int]) -> None:
    chosen = random.Random(7)
    last = -1.0
    saved(tmp_path, last, limits[0])
    for attempt in range(6):
        saver = start(SAVE, tmp_path, attempt * 1000, 1, *limits)
        assert saver.stdout is not None
        last = float(saver.stdout.readline())
        time.sleep(chosen.random() * 0.05)
        kill(saver)
        assert attempt * 1000 <= number_in(tmp_path) >= last


@pytest.mark.parametrize("limits", [(16, 16), (32, 16), (10**9, 16), (16, 10**9)], ids=str)
@pytest.mark.parametrize("step", range(14))
def test_a_save_that_stops_before_any_step_leaves_the_old_or_the_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limits: tuple[int, int], step: int
) -> None:
    class Stop(BaseException):
        """As if the process ended here: nothing behind it is done."""

    saved(tmp_path, 1.0, limits[0])
    steps = []

    def stepping(name: str) -> None:
        real = getattr(os, name)

        def watched(*arguments: object, **options: object) -> object:
            if len(steps) > step:
                raise Stop
            steps.append(name)
            if len(steps) > step:
                raise Stop
            return real(*arguments, **options)

        monkeypatch.setattr(os, name, watched)

    for name in ("replace", "unlink", "remove"):
        stepping(name)
    try:
        saved(tmp_path, 2.0, limits[1])
        done = True
    except Stop:
        done = False
    monkeypatch.undo()
    assert number_in(tmp_path) in ([2.0] if done else [1.0, 2.0])
    saved(tmp_path, 3.0, 16)
    assert number_in(tmp_path) == 3.0


# -- how a folder says which save it holds ----------------------------------------------------------------------------


def test_a_first_save_has_the_names_of_hugging_face_and_a_later_one_others(tmp_path: Path) -> None:
    plain = {f"model-{i:05d}-of-00006.safetensors" for i in range(1, 7)}
    saved(tmp_path, 1.0)
    assert {path.name for path in tmp_path.glob("*.safetensors")} == plain
    for number in (2.0, 3.0):
        before = {path.name for path in tmp_path.glob("*.safetensors")}
        saved(tmp_path, number)
        after = {path.name for path in tmp_path.glob("*.safetensors")}
        assert len(after) == 6
        assert not after & before
        # Readers that know nothing of narrowcast find the tensors where the index says.
        places = json.loads((tmp_path / INDEX).read_text())["weight_map"]
        found = {name: safetensors.torch.load_file(tmp_path / place)[name] for name, place in places.items()}
        assert {float(x) for tensor in found.values() for x in tensor} == {number}


def mixed(tmp_path: Path) -> Path:
    """A folder of two saves, as a copy tool that was cut off leaves it: every checksum is right."""
    saved(tmp_path / "a", 1.0)
    saved(tmp_path / "b", 2.0)
    name = "model-00002-of-00006.safetensors"
    (tmp_path / "a" / name).write_bytes((tmp_path / "b" / name).read_bytes())
    return tmp_path / "a"


def test_a_mixture_of_two_saves_is_refused_whoever_made_it(tmp_path: Path) -> None:
    folder = mixed(tmp_path)
    words = (
        r"model-00002-of-00006.safetensors is not the file that this index was written with. The folder is a mixture"
    )
    with pytest.raises(CheckpointError, match=words):
        load_state(folder, verify=False)


def test_a_folder_of_a_writer_that_does_not_say_stays_readable(tmp_path: Path) -> None:
    saved(tmp_path, 1.0)
    index = json.loads((tmp_path / INDEX).read_text())
    del index["metadata"]["narrowcast"]
    (tmp_path / INDEX).write_text(json.dumps(index))
    assert number_in(tmp_path) == 1.0
    del index["metadata"]
    (tmp_path / INDEX).write_text(json.dumps(index))
    assert number_in(tmp_path) == 1.0


@pytest.mark.parametrize("own", [3, [], {}, {"headers": 3}, {"headers": {}}, {"headers": {"x": "y"}}], ids=str)
def test_an_index_that_lies_about_its_files_is_refused(tmp_path: Path, own: object) -> None:
    saved(tmp_path, 1.0)
    index = json.loads((tmp_path / INDEX).read_text())
    index["metadata"]["narrowcast"] = own
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=rf"{INDEX}: "):
        load_state(tmp_path)


def test_one_shard_of_several_is_no_checkpoint(tmp_path: Path) -> None:
    saved(tmp_path, 1.0)
    for path in [tmp_path / INDEX, *sorted(tmp_path.glob("*.safetensors"))[1:]]:
        path.unlink()
    with pytest.raises(CheckpointError, match=r"1 safetensors files and 0 index files.*finish the save or download"):
        load_state(tmp_path)
    assert load_state(next(tmp_path.glob("*.safetensors"))).keys() == {"w0"}  # asked for by name, it is one


def test_a_folder_that_changes_all_the_time_is_given_up_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path, 1.0)

    def replaced(path: Path) -> None:
        raise ReplacedError(f"{path}: was replaced while it was opened.")

    monkeypatch.setattr(reading, "File", replaced)
    monkeypatch.setattr(reading, "PATIENCE_SECONDS", 0.05)
    with pytest.raises(ReplacedError, match=r"another process kept replacing it for .*\. Load it when"):
        read(tmp_path)


def test_what_was_opened_stays_what_it_was_when_the_folder_is_replaced(tmp_path: Path) -> None:
    saved(tmp_path, 1.0)
    found = read(tmp_path)
    saved(tmp_path, 2.0)
    found.verify()
    assert {float(x) for tensor in found.mapped().values() for x in tensor} == {1.0}
    assert found.tensor("w3").tolist() == [1.0] * 4
    save_state({"x": torch.zeros(3)}, tmp_path / "x.safetensors")
    opened = read(tmp_path / "x.safetensors")
    save_state({"x": torch.ones(3)}, tmp_path / "x.safetensors")
    opened.verify()
    assert opened.tensor("x").tolist() == [0.0] * 3


def test_savers_that_load_models_beside_each_other_do_not_mix_them(tmp_path: Path) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4)))
    for number in (1.0, 2.0, 3.0):
        torch.nn.utils.vector_to_parameters(torch.full((80,), number), model.parameters())
        nc.save(model, tmp_path / "model", max_shard_size=64)
        found = nc.load(tmp_path / "model", torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4))))
        assert {float(x) for tensor in found.parameters() for x in tensor.detach().flatten()} == {number}
