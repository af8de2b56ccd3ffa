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
    "integrations": {
        "accelerate",
        "compressed_tensors",
        "huggingface_hub",
        "lightning",
        "ml_dtypes",
        "onnx_ir",
        "onnxscript",
        "transformers",
    },
    "cli": {"matplotlib"},
    "compat": {"matplotlib"},
}

# Each part, and the other parts of narrowcast that it may import. Everything above integrations may be imported by it.
BELOW = {"errors", "kernels", "codecs"}
ABOVE = BELOW | {"distributed", "nn", "checkpoint"}
ARROWS = {
    "errors": set(),
    "kernels": {"errors"},
    "codecs": {"kernels", "errors"},
    "distributed": BELOW,
    "nn": BELOW,
    "checkpoint": BELOW | {"nn"},
    "optim": BELOW | {"distributed", "nn"},
    "byte_gpt": {"errors"},
    "netlab": {"errors"},
    "registration": {"kernels"},
    "generate": BELOW | {"nn", "checkpoint"},
    "integrations": ABOVE,
    "compat": ABOVE,
    "cli": ABOVE | {"integrations", "compat", "byte_gpt", "netlab", "generate"},
    "public": ABOVE | {"integrations", "compat", "optim"},
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


# Inside distributed: each room, and the other rooms that it may import.
ROOMS = {
    "stats": set(),
    "transport": {"stats"},
    "encoder": {"stats", "transport"},
    "collective": {"stats", "transport", "encoder"},
    "protocols": {"transport", "encoder", "collective"},
    "arguments": set(),
    "meshes": {"arguments", "stats", "transport", "encoder", "collective", "protocols"},
    "entry": {"arguments", "meshes", "transport"},
    "collectives": {"arguments", "entry", "meshes", "collective", "protocols", "transport"},
    "point_to_point": {"arguments", "entry", "collective", "collectives", "transport"},
    "functional": {"arguments", "entry", "encoder", "collectives"},
    "gradients": {
        *("stats", "transport", "encoder", "collective", "protocols", "arguments", "entry", "collectives"),
        *("gradients", "meshes", "planning"),
    },
    "planning": {"stats", "transport", "collective", "protocols", "arguments", "meshes", "gradients"},
}
PLANNERS = {"compression"}
"""The modules of gradients that know planning; planning knows those of gradients that do not."""
IMPLEMENTATIONS = {"gloo", "gloo_connections", "gloo_messages", "nccl", "staged"}


def wrong_rooms(source: str, module: str) -> list[str]:
    """The imports of a module of distributed that no arrow between rooms allows."""
    path = module.split(".")[2:]
    wrong = []
    for name in imports_of(source, module):
        other = name.split(".")[2:]
        if not name.startswith("narrowcast.distributed.") or not path or path == ["__init__"]:
            continue
        if other[0] != path[0] and other[0] in ROOMS and other[0] not in ROOMS[path[0]]:
            wrong.append(name)
        if path[0] == "gradients" and other[0] == "planning" and path[-1] not in PLANNERS:
            wrong.append(name)
        if path[0] == "planning" and other[:2] == ["gradients", *PLANNERS]:
            wrong.append(name)
        if path[0] == "protocols" and other[0] == "transport" and other[1:2] and other[1] in IMPLEMENTATIONS:
            wrong.append(name)
    return wrong


@pytest.mark.parametrize("module", [name for name in MODULES if name.startswith("narrowcast.distributed.")])
def test_rooms_of_distributed_follow_their_arrows(module: str) -> None:
    assert wrong_rooms(MODULES[module].read_text(), module) == []


@pytest.mark.parametrize(
    ("source", "module"),
    [
        ("from narrowcast.distributed.gradients import layout", "narrowcast.distributed.protocols.pipeline"),
        ("def f():\n    from narrowcast.distributed import collective", "narrowcast.distributed.transport.group"),
        ("from narrowcast.distributed.transport.gloo import EAGER", "narrowcast.distributed.protocols.two_stage"),
        ("from narrowcast.distributed.planning.link import Link", "narrowcast.distributed.gradients.ddp"),
        (
            "from narrowcast.distributed.gradients.compression import GradientCompression",
            "narrowcast.distributed.planning.planner",
        ),
    ],
)
def test_the_checker_of_rooms_can_fail(source: str, module: str) -> None:
    assert len(wrong_rooms(source, module)) == 1


def test_no_import_hides_a_cycle() -> None:
    """Modules that import each other, lazily or not, are in one knot: there is none of two modules or more."""
    graph = {
        name.removesuffix(".__init__"): {
            target
            for wanted in imports_of(_without_types(path.read_text()), name)
            for target in (_module_of(wanted),)
            if target and target != name.removesuffix(".__init__")
        }
        for name, path in MODULES.items()
    }
    assert _knots(graph) == []


def _without_types(source: str) -> str:
    """A file without what it imports for the type checker alone."""
    tree = ast.parse(source)
    tree.body = [
        node for node in tree.body if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
    ]
    return ast.unparse(tree)


def _module_of(name: str) -> str:
    """The module of this package that an import leads to: `a.b.c` may be a name in `a.b`."""
    known = {module.removesuffix(".__init__") for module in MODULES}
    return name if name in known else name.rpartition(".")[0] if name.rpartition(".")[0] in known else ""


def _knots(graph: dict[str, set[str]]) -> list[list[str]]:
    """The strongly connected components of more than one module (Tarjan)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    knots: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for target in graph.get(node, ()):
            if target not in index:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in stack:
                low[node] = min(low[node], index[target])
        if low[node] == index[node]:
            knot = [stack.pop()]
            while knot[-1] != node:
                knot.append(stack.pop())
            if len(knot) > 1:
                knots.append(sorted(knot))

    for node in graph:
        if node not in index:
            visit(node)
    return knots


def test_the_search_for_cycles_can_fail() -> None:
    assert _knots({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]


def test_every_part_of_the_house_has_arrows() -> None:
    assert {part_of(module) for module in MODULES} - {"__init__"} <= set(ARROWS)


@pytest.mark.parametrize(
    ("source", "module", "wrong"),
    [
        ("from narrowcast.codecs import base", "narrowcast.kernels.operators", ["narrowcast.codecs.base"]),
        ("import narrowcast.checkpoint.models", "narrowcast.codecs.cast", ["narrowcast.checkpoint.models"]),
        ("from narrowcast import nn", "narrowcast.codecs.cast", ["narrowcast.nn"]),
        (
            "def f():\n    from narrowcast.nn import linear",
            "narrowcast.distributed.gradients.ddp",
            ["narrowcast.nn.linear"],
        ),
        ("from ...distributed import entry", "narrowcast.nn.modules.linear", ["narrowcast.distributed.entry"]),
        ("from ... import checkpoint", "narrowcast.nn.modules.linear", ["narrowcast.checkpoint"]),
        ("import narrowcast", "narrowcast.kernels.operators", ["narrowcast"]),
        ("import pandas", "narrowcast.codecs.base", ["pandas"]),
        ("import transformers", "narrowcast.nn.modules.linear", ["transformers"]),
        ("import transformers", "narrowcast.integrations.transformers", []),
        ("from narrowcast.kernels import operators\nimport torch, math", "narrowcast.codecs.base", []),
        ("from .layout import Format", "narrowcast.kernels.operators", []),
        ("from narrowcast.distributed import entry", "narrowcast.cli.bench", []),
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
def test_no_file_is_over_300_lines_and_each_says_what_it_is(module: str) -> None:
    text = MODULES[module].read_text()
    assert len(text.splitlines()) <= 300
    assert ast.get_docstring(ast.parse(text))


MOST_LINES = 50


def long_functions(source: str) -> list[str]:
    """The functions of a file that have too many lines; signatures, help texts and docstrings count."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return [
        f"{node.name}: {node.end_lineno - node.lineno + 1} lines"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, functions) and node.end_lineno - node.lineno >= MOST_LINES
    ]


@pytest.mark.parametrize("module", MODULES)
def test_no_function_is_over_50_lines(module: str) -> None:
    assert long_functions(MODULES[module].read_text()) == []


def test_the_search_for_long_functions_can_fail() -> None:
    method = "class A:\n    def f(\n        self,\n    ) -> None:\n" + "        pass\n" * (MOST_LINES - 3)
    assert long_functions(method) == []
    assert long_functions(method + "        pass\n") == ["f: 51 lines"]
