"""The house of DESIGN.md: which part may import which, what importing costs, and what stands on the front door."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import narrowcast as nc
from narrowcast import public

SOURCE = Path(nc.__file__).parent
EXTERNAL = {"numpy", "torch", "safetensors", "typer", "rich", "triton"} | set(sys.stdlib_module_names)
EXTRAS = {
    "integrations": {"accelerate", "compressed_tensors", "huggingface_hub", "lightning", "transformers"},
    "cli": {"matplotlib"},
}

# Each part, and the other parts of narrowcast that it may import. Everything above integrations may be imported by it.
BELOW = {"errors", "kernels", "codecs"}
ABOVE = BELOW | {"distributed", "nn", "checkpoint", "sensitivity"}
ARROWS = {
    "errors": set(),
    "kernels": {"errors"},
    "codecs": {"kernels", "errors"},
    "distributed": BELOW,
    "nn": BELOW,
    "checkpoint": BELOW | {"nn"},
    "sensitivity": BELOW,
    "integrations": ABOVE,
    "compat": ABOVE,
    "cli": ABOVE | {"integrations", "compat"},
    "public": ABOVE | {"integrations", "compat"},
}


def part_of(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def imports_of(source: str, module: str) -> list[str]:
    """The modules that a file imports, anywhere in it, as absolute names; `from a import b` counts as a.b and a."""
    package = module.split(".")
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = [*package[: len(package) - node.level]] if node.level else []
            base += node.module.split(".") if node.module else []
            found += [".".join([*base, alias.name]) for alias in node.names]
    return found


def forbidden(source: str, module: str) -> list[str]:
    """The imports of a file that no arrow allows."""
    part = part_of(module)
    wrong = []
    for name in imports_of(source, module):
        if name.split(".")[0] != "narrowcast":
            if name.split(".")[0] not in EXTERNAL | EXTRAS.get(part, set()):
                wrong.append(name)
            continue
        other = part_of(name)
        if other and other != part and other in ARROWS and other not in ARROWS.get(part, set(ARROWS)):
            wrong.append(name)
        if name == "narrowcast" and part not in ("", "cli", "integrations", "compat", "public"):
            wrong.append(name)
    return wrong


def modules() -> dict[str, Path]:
    names = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE.parent).with_suffix("").parts
        names[".".join(parts)] = path
    return names


MODULES = modules()


@pytest.mark.parametrize("module", MODULES)
def test_imports_follow_the_arrows(module: str) -> None:
    assert forbidden(MODULES[module].read_text(), module) == []


def test_every_part_of_the_house_has_arrows() -> None:
    assert {part_of(module) for module in MODULES} - {"__init__"} <= set(ARROWS)


@pytest.mark.parametrize(
    ("source", "module", "wrong"),
    [
        ("from narrowcast.codecs import base", "narrowcast.kernels.operators", ["narrowcast.codecs.base"]),
        ("import narrowcast.codecs.payload", "narrowcast.codecs.cast", ["narrowcast.codecs.payload"]),
        ("from narrowcast import nn", "narrowcast.codecs.cast", ["narrowcast.nn"]),
        (
            "def f():\n    from narrowcast.nn import linear",
            "narrowcast.distributed.gradients.ddp",
            ["narrowcast.nn.modules.linear"],
        ),
        ("from ..distributed import lane", "narrowcast.nn.modules.linear", ["narrowcast.distributed.transport.lane"]),
        ("from .. import checkpoint", "narrowcast.nn.modules.linear", ["narrowcast.checkpoint"]),
        ("import narrowcast", "narrowcast.kernels.operators", ["narrowcast"]),
        ("import pandas", "narrowcast.codecs.base", ["pandas"]),
        ("import transformers", "narrowcast.nn.modules.linear", ["transformers"]),
        ("import transformers", "narrowcast.integrations.transformers", []),
        ("from narrowcast.kernels import ops\nimport torch, math", "narrowcast.codecs.base", []),
        ("from .layout import Format", "narrowcast.kernels.operators", []),
        ("from narrowcast.distributed import lane", "narrowcast.cli.bench", []),
    ],
)
def test_the_checker_of_arrows_can_fail(source: str, module: str, wrong: list[str]) -> None:
    assert forbidden(source, module) == wrong


# -- importing is free ----------------------------------------------------------------------------------------------


def run(code: str) -> str:
    """What a fresh Python prints on either stream. It may keep bytecode, as any user's does."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout + done.stderr


def test_the_front_door_opens_without_torch_and_then_has_every_public_name() -> None:
    code = "import sys, narrowcast; print('torch' in sys.modules); from narrowcast import *; print(encode.__name__)"
    assert run(code).split() == ["False", "encode"]
    assert set(public.__all__) <= set(dir(nc))
    with pytest.raises(AttributeError, match="no attribute 'encoed'"):
        nc.encoed  # noqa: B018


def test_importing_prints_nothing() -> None:
    assert run("import narrowcast") == ""


def test_importing_loads_no_triton_no_kernel_and_no_extra() -> None:
    code = (
        "import sys, torch; before = set(sys.modules); import narrowcast;"
        "new = {name.split('.')[0] for name in set(sys.modules) - before};"
        "print(*sorted(new & {'triton', 'typer', 'rich', 'safetensors'}));"
        "print('narrowcast.kernels.triton' in sys.modules)"
    )
    assert run(code).split() == ["False"]


def test_importing_and_encoding_start_no_cuda_and_leave_threads_and_loggers_alone() -> None:
    code = (
        "import logging, torch; threads = torch.get_num_threads(); state = torch.get_rng_state();"
        "import narrowcast as nc; assert not torch.cuda.is_initialized();"
        "nc.decode(nc.encode(torch.ones(100), 'int4')); assert not torch.cuda.is_initialized();"
        "assert torch.get_num_threads() == threads; assert not logging.root.handlers;"
        "assert torch.equal(torch.get_rng_state(), state)"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=120)


def test_importing_adds_less_than_50_ms_to_torch() -> None:
    # Processor time, since others are at work too. The best of 5: a busy machine can only make it slower.
    code = "import time, torch; t = time.process_time(); import narrowcast; print(time.process_time() - t)"
    assert min(float(run(code)) for _ in range(5)) < 0.05


# -- the front door -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["codec", "list_codecs", "encode", "decode", "Codec", "Payload", "which_kernel", "codecs", "errors"]
)
def test_a_public_name_is_there(name: str) -> None:
    assert hasattr(nc, name)
    assert name in nc.__all__


def test_the_front_door_lists_only_what_exists_and_in_order() -> None:
    assert all(hasattr(nc, name) for name in nc.__all__)
    assert list(nc.__all__) == sorted(nc.__all__)


def test_the_front_door_only_re_exports() -> None:
    tree = ast.parse((SOURCE / "public.py").read_text())
    allowed = (ast.Import, ast.ImportFrom, ast.Assign, ast.Expr)
    assert all(isinstance(node, allowed) for node in tree.body)


def test_the_package_is_typed() -> None:
    assert (SOURCE / "py.typed").exists()


@pytest.mark.parametrize("module", MODULES)
def test_no_file_is_over_350_lines_and_each_says_what_it_is(module: str) -> None:
    text = MODULES[module].read_text()
    assert len(text.splitlines()) <= 350
    assert ast.get_docstring(ast.parse(text))
