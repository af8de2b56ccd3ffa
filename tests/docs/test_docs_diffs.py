"""Every diff in README, CONTRIBUTING and docs: both its sides run on two ranks, and the new one compresses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from diff_ranks import missing, side_of
from fences import all_blocks
from running import run

# What must be found wrong; in the same launch, as the ranks' imports take most of the time.
WRONG = {
    "old side": ("- model = DistributedDataParallel(modle)\n+ DistributedDataParallel(model)", "name 'modle' is not"),
    "new side": ("  model = DistributedDataParallel(model)\n+ nc.compress_gradient(model)", "no attribute"),
    "not compressed": (
        "  model = DistributedDataParallel(model)\n+ nc.compress_gradients(model, None)",
        "side +: compressed is False",
    ),
    "compressed before": (
        "- ncd.all_reduce(tensor, codec='int8')\n+ ncd.all_reduce(tensor, codec='int4')  # dist.all_reduce(tensor)",
        "side -: compressed is True",
    ),
    "not summed": ("- dist.all_reduce(1 * tensor)\n+ ncd.all_reduce(tensor, codec='int8')", "neither tensor holds"),
    "unknown": ("- quantize(model)\n+ nc.quantize_(model)", "no setting fits it"),
    "no mark": ("-dist.all_reduce(tensor)\n+ ncd.all_reduce(tensor)", "lines start with a mark"),
}


def test_both_sides_of_every_diff_run_and_the_new_one_compresses(tmp_path: Path) -> None:
    diffs = {str(block): block.text for block in all_blocks("diff")}
    assert len(diffs) > 3
    absent = {name: package for name, text in diffs.items() if (package := missing(text))}
    pairs = [(name, text) for name, text in diffs.items() if name not in absent]
    (tmp_path / "diffs.json").write_text(json.dumps([*pairs, *((name, text) for name, (text, _) in WRONG.items())]))
    run(f"torchrun --nproc-per-node 2 {Path(__file__).with_name('diff_ranks.py')} diffs.json .", tmp_path)
    for rank in range(2):
        outcomes = json.loads((tmp_path / f"{rank}.json").read_text())
        assert {name: outcomes[name] for name, _ in pairs} == {name: "" for name, _ in pairs}
        for name, (_, words) in WRONG.items():
            assert words in outcomes[name], f"{name}: {outcomes[name]}"
    if absent:
        pytest.skip(f"all but these, whose packages are missing: {absent}")


def test_the_sides_of_a_diff_are_its_lines_without_marks() -> None:
    diff = "  for x in y:\n-     old(x)\n+     new(x)\n\n  z\n"
    assert side_of(diff, "-") == "for x in y:\n    old(x)\n\nz"
    assert side_of(diff, "+") == "for x in y:\n    new(x)\n\nz"
