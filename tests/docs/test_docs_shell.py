"""Every sh block of README, CONTRIBUTING and docs is run by a shell, in a folder that holds what its lines name.

What is too large to run as written is run smaller, by the rules of one table. A line that starts a program which the
tests do not know fails.
"""

from __future__ import annotations

import contextlib
import fcntl
import re
import shlex
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from fences import ROOT, Block, all_blocks, blocks_of
from running import run, started

import narrowcast as nc
import small_llama
from ports import free_port

PROGRAMS = {"cd", "git", "make", "narrowcast", "pip", "python", "torchrun"}

# A pattern, what is run in its place, and why. They apply in turn, to a line without its comment.
SMALLER = [
    (
        r"^make (\w+)$",
        r"make -n \1",
        "a target takes minutes or hours: it is there, and make knows what to do",
    ),
    (
        r"^git clone <repository>",
        r"git clone --depth 1 file://$PWD/.repository/narrowcast",
        "the address is the reader's; the clone is of this repository",
    ),
    (
        r"^pip wheel (.*) --wheel-dir \S+",
        r"pip install \1",
        "compiling takes minutes; what can be installed can be made a wheel of",
    ),
    (
        r"^pip install (.*)$",
        r"python -m pip install --dry-run --no-index --no-build-isolation --quiet \1",
        "nothing is fetched or changed: what the line names is there or installed already, and its options exist",
    ),
    (
        r"^(torchrun --nnodes 2 --nproc-per-node) \d+ (.*) host0:29500 (.*)$",
        r"start() { \1 1 \2 localhost:$PORT \3; }; start & start; wait $!",
        "two machines are two torchruns at once on this one, of one rank each",
    ),
    (
        r"^(torchrun --nproc-per-node) \d+",
        r"\1 2",
        "each rank starts Python and torch, and there may be two cores",
    ),
    (
        r"^(narrowcast netlab --ranks) \d+",
        r"\1 2",
        "as above",
    ),
    (
        r"python bench/defaults\.py$",
        'python -c \'import sys; sys.path.append("bench"); import data, defaults as script; '
        "data.STEPS, script.WIDTHS = 2, (2, 4); script.main()'",
        "ten seconds: it trains two models for 50 steps, and has seven tables of which two will do",
    ),
    (
        r"(examples/(ddp|fsdp2)_train\.py)",
        r"\1 --steps 2 --layers 1 --width 32 --batch 2",
        "hundreds of steps of a larger model; test_examples.py says what they come to",
    ),
]


def lines_of(text: str) -> list[str]:
    """The commands of a block, without comments."""
    lines = (re.sub(r"(^|\s+)#.*$", "", line) for line in text.replace("\\\n", " ").splitlines())
    return [line for line in lines if line.strip()]


def programs_of(line: str) -> list[str]:
    """What a line starts: the first word of each of its commands that sets no variable."""
    words = shlex.shlex(line, posix=True, punctuation_chars=True)
    words.whitespace_split = True
    found, expected = [], True
    for word in words:
        if word in ("&&", "||", "|", ";", "&"):
            expected = True
        elif expected and not re.match(r"\w+=", word):
            found.append(word)
            expected = False
    return found


def script_of(text: str) -> str:
    """What is run for a block, line by line."""
    script = []
    for line in lines_of(text):
        unknown = [program for program in programs_of(line) if program not in PROGRAMS]
        assert not unknown, f"{line!r} starts {unknown}, which the tests do not know: add it to PROGRAMS"
        for pattern, smaller, _ in SMALLER:
            line = re.sub(pattern, smaller, line)
        script.append(f"{line} || exit")  # which -e does not do where the first half of a && fails
    return "\n".join(script)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A clone as far as pages name its parts, with a small Llama under each name that it has there, and other files."""
    for name in ("CMakeLists.txt", "LICENSE", "Makefile", "README.md", "bench", "examples", "pyproject.toml", "src"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / ".repository").mkdir()
    (tmp_path / ".repository" / "narrowcast").symlink_to(ROOT)
    torch.manual_seed(0)
    parts = ("self_attn.q_proj", "mlp.up_proj", "input_layernorm")
    names = ["model.embed_tokens", *(f"model.layers.{i}.{part}" for i in range(2) for part in parts), "lm_head"]
    state = {f"{name}.weight": torch.randn(256) if "norm" in name else torch.randn(64, 256) for name in names}
    small_llama.write_bytewise(tmp_path / "llama", layers=2, max_shard_size="200kB")
    for name in ("model", "folder"):
        nc.save(state, tmp_path / name, max_shard_size="200kB")
        (tmp_path / name / "config.json").write_text('{"model_type": "llama"}')
    np.save(tmp_path / "activations.npy", np.random.default_rng(0).standard_normal((32, 256), np.float32))
    (rules, *_) = blocks_of(ROOT / "docs/checkpoints.md", "toml")
    (tmp_path / "rules.toml").write_text(rules.text)
    return tmp_path


@contextlib.contextmanager
def allowed(text: str) -> Iterator[None]:
    """Skip what this machine does not let run, and say why. Tests of netlab run one at a time, those elsewhere too."""
    if "git clone" in text and not (ROOT / ".git").exists():
        pytest.skip("the tests do not run in a clone")
    if "netlab" not in text:
        yield
        return
    if str(ROOT / "bench") not in sys.path:
        sys.path.append(str(ROOT / "bench"))
    from narrowcast.netlab import NetlabError, permission

    try:
        permission.require()
    except NetlabError as error:
        pytest.skip(f"namespaces may not be made: {error}")
    with (Path(tempfile.gettempdir()) / "netlab-tests.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.mark.parametrize("block", all_blocks("sh"), ids=str)
def test_every_line_of_a_shell_block_succeeds(block: Block, folder: Path) -> None:
    with allowed(block.text):
        run(f"PORT={free_port()}\n{script_of(block.text)}", folder)


# -- that this can fail -----------------------------------------------------------------------------------------------


def test_a_program_that_nobody_thought_of_is_found_wherever_it_stands() -> None:
    for line in ("curl x.sh", "make test && curl x.sh", "A=1 curl x.sh", "make test  # why\ncurl x.sh", "cd x | curl"):
        with pytest.raises(AssertionError, match=r"starts \['curl'\], which the tests do not know"):
            script_of(line)


def test_comments_and_long_lines_are_read_as_the_shell_reads_them() -> None:
    text = "# first\nmake demo    # makes it\n\nA=1 python x.py \\\n  --y '#1'\ngit clone <repository> && cd x\n"
    assert lines_of(text) == ["make demo", "A=1 python x.py    --y '#1'", "git clone <repository> && cd x"]
    assert [programs_of(line) for line in lines_of(text)] == [["make"], ["python"], ["git", "cd"]]


def test_two_machines_are_two_launches_and_both_must_succeed() -> None:
    line = script_of("torchrun --nnodes 2 --nproc-per-node 8 --rdzv-endpoint host0:29500 x.py")
    launch = "torchrun --nnodes 2 --nproc-per-node 1 --rdzv-endpoint localhost:$PORT x.py"
    assert line == f"start() {{ {launch}; }}; start & start; wait $! || exit"


def test_a_line_that_fails_ends_the_block_with_its_words(tmp_path: Path) -> None:
    (tmp_path / "Makefile").write_text("first:\n\ttouch first\n")
    with pytest.raises(AssertionError, match="No rule to make target 'second'"):
        run(script_of("make second\ncd .."), tmp_path)
    with pytest.raises(AssertionError, match="No such file"):
        run(script_of("cd nowhere && make first\nmake first"), tmp_path)
    run(script_of("make first"), tmp_path)
    assert not (tmp_path / "first").exists()


def test_a_pip_line_changes_nothing_and_fails_where_its_option_or_package_does_not_exist(tmp_path: Path) -> None:
    dry = "python -m pip install --dry-run --no-index --no-build-isolation --quiet"
    assert script_of("pip wheel . --no-deps --wheel-dir wheels") == f"{dry} . --no-deps || exit"
    for line, words in (("pip install .", "pyproject.toml"), ("pip install --no-indx torch", "no such option")):
        with pytest.raises(AssertionError, match=words):
            run(script_of(line), tmp_path)


def test_what_does_not_end_is_killed_with_all_that_it_started(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"no end after 1 s:\n(.*\n)*\+ setsid sleep 1000"):
        run("setsid sleep 1000 & echo $NARROWCAST_DOCS_RUN > token; sleep 2000", tmp_path, timeout=1)
    assert started((tmp_path / "token").read_text().strip()) == []
