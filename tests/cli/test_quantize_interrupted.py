"""`quantize --rounding gptq`, stopped by Ctrl-C in the middle: a process of its own, and a real signal."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from test_quantize_rounding import WORDS, run, save_bert

import narrowcast as nc


def test_ctrl_c_leaves_no_output_and_the_same_command_goes_on(tmp_path: Path) -> None:
    source, out, whole = save_bert(tmp_path / "bert", 64), tmp_path / "out", tmp_path / "whole"
    (tmp_path / "text.txt").write_text("\n".join(" ".join(WORDS[i : i + 9]) for i in range(30)))
    options = ["--codec", "int4:block=16", "--rounding", "gptq", "--data", str(tmp_path / "text.txt")]
    kept = tmp_path / ".out.narrowcast-rounding"

    command = [sys.executable, "-m", "narrowcast.cli", "quantize", str(source), str(out), *options]
    environment = {**os.environ, "PYTHONPATH": str(Path(nc.__file__).parent.parent), "OMP_NUM_THREADS": "1"}
    listens = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # jobs of some shells start without it
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, preexec_fn=listens, **pipes) as process:
        deadline = time.monotonic() + 120
        while len(finished(kept)) < 4 and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.005)
        process.send_signal(signal.SIGINT)
        printed, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors
    assert errors.splitlines()[-1] == "error: stopped."
    assert "Traceback" not in errors
    assert not printed
    assert not out.exists()
    before = finished(kept)
    assert 4 <= len(before) < 16  # the model has 16 weights: three tables, twelve layers, one pooler
    assert not [path for path in kept.iterdir() if path.name.endswith(".part")]

    again = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    assert not kept.exists()
    result = run("quantize", source, whole, *options)
    assert result.exit_code == 0, result.output
    assert (out / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


def finished(folder: Path) -> list[Path]:
    return list(folder.glob("*.rows.pt"))
