"""Every tensor that the library makes names its dtype and its device.

`torch.zeros(3)` takes its dtype from `torch.set_default_dtype` and its device from `torch.set_default_device` or a
`with torch.device(...)` around the call: what surrounds a call would change its numbers. This reads the source. What
inherits both (`zeros_like`, `new_empty`, `x * 2`) and what reads bytes where they lie (`frombuffer`, `from_numpy`) is
free. The tests of codecs, modules and collectives in other surroundings (ambient.py) are the other half of the rule.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from torch.utils import _device

import narrowcast as nc

SOURCE = Path(nc.__file__).parent

CONSTRUCTORS = {
    *(function.__name__ for function in _device._device_constructors()),  # type: ignore[no-untyped-call]
    *["normal", "fftfreq", "rfftfreq"],
}
"""The functions of torch that a default device applies to, and those that a default dtype applies to besides."""

TYPES = {
    f"{kind}Tensor" for kind in ("", "Float", "Double", "Half", "BFloat16", "Int", "Long", "Short", "Byte", "Bool")
}
"""`torch.Tensor(3)` follows the default dtype and cannot say otherwise; nor can its old relatives name a device."""


def unnamed(source: str) -> list[str]:
    """The constructors in a file that leave their dtype or device to whoever surrounds the call."""
    tree = ast.parse(source)
    modules, functions = _names_of_torch(tree)
    calls = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    found = []
    for node in ast.walk(tree):
        name = _of_torch(node, modules, functions)
        if name in TYPES and id(node) in calls:
            found.append(f"line {node.lineno}: torch.{name}(...): use torch.tensor or torch.empty")
        if name in CONSTRUCTORS:
            given = {keyword.arg for keyword in calls[id(node)].keywords} if id(node) in calls else set()
            missing = [word for word in ("dtype", "device") if word not in given]
            if missing:
                found.append(f"line {node.lineno}: torch.{name} does not name its {' and '.join(missing)}")
    return found


def _names_of_torch(tree: ast.AST) -> tuple[set[str], dict[str, str]]:
    """What a file calls torch (and its parts), and which of torch's functions it has by a name of their own."""
    modules, functions = {"torch"}, {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.asname for alias in node.names if alias.asname and alias.name.startswith("torch")}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            functions |= {alias.asname or alias.name: alias.name for alias in node.names}
    return modules, functions


def _of_torch(node: ast.AST, modules: set[str], functions: dict[str, str]) -> str | None:
    """The name, in torch, of the function that an expression stands for."""
    if isinstance(node, ast.Name):
        return functions.get(node.id)
    inner = node
    while isinstance(inner, ast.Attribute):
        inner = inner.value
    if isinstance(node, ast.Attribute) and isinstance(inner, ast.Name) and inner.id in modules:
        return node.attr
    return None


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCE)))
def test_every_constructor_names_its_dtype_and_device(path: Path) -> None:
    assert not unnamed(path.read_text()), f"{path}: name dtype= and device= (device='cpu' where a CPU table is meant)"


@pytest.mark.parametrize(
    "source",
    [
        "import torch\nx = torch.zeros(3)",
        "import torch\nx = torch.zeros(3, dtype=torch.float32)",
        "import torch\nx = torch.zeros(3, device='cpu')",
        "import torch\nx = torch.tensor(0.5)",
        "import torch\nx = torch.as_tensor(table, dtype=torch.float64)",
        "import torch\nx = torch.arange(8, device=y.device)",
        "import torch\nx = torch.nn.Parameter(torch.empty(3, 4))",
        "import torch\ndef f():\n    return g(torch.randn(size=(3,)))",
        "import torch\nx = torch.fft.fftfreq(3)",
        "import torch\nx = torch.Tensor([1.0])",
        "import torch\nx = torch.FloatTensor(3)",
        "import torch\nroom = functools.partial(torch.empty, device='cpu')",
        "import torch as t\nx = t.full((3,), 1.0)",
        "from torch import ones\nx = ones(3)",
        "from torch import empty as room\nx = room(3)",
    ],
)
def test_a_constructor_that_leaves_it_open_would_be_found(source: str) -> None:
    assert len(unnamed(source)) == 1


@pytest.mark.parametrize(
    "source",
    [
        "import torch\nx = torch.zeros(3, dtype=torch.float32, device='cpu')",
        "import torch\nx = torch.zeros_like(y)\nz = y.new_zeros(3)",
        "import torch\nx = torch.frombuffer(data, dtype=torch.uint8)",
        "from torch import Tensor\ndef f(x: Tensor) -> bool:\n    return isinstance(x, Tensor)",
        "x = numpy.zeros(3)\ny = zeros(3)",
    ],
)
def test_what_names_both_or_inherits_both_passes(source: str) -> None:
    assert not unnamed(source)


def test_the_list_of_constructors_has_those_that_everybody_uses() -> None:
    assert {
        "zeros",
        "ones",
        "empty",
        "full",
        "tensor",
        "as_tensor",
        "arange",
        "linspace",
        "randn",
        "eye",
    } <= CONSTRUCTORS
