"""The integrations are there for the asking, and cost nothing until then."""

from __future__ import annotations

import subprocess
import sys

import pytest

import narrowcast as nc


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    return done.stdout


def test_importing_narrowcast_loads_none_of_their_libraries() -> None:
    libraries = {"transformers", "compressed_tensors", "huggingface_hub", "matplotlib", "accelerate"}
    libraries |= {"lightning", "tensorboard", "torch.utils.tensorboard"}
    code = f"import narrowcast, narrowcast.cli, sys; print(sorted({libraries!r} & set(sys.modules)))"
    assert run(code).split() == ["[]"]


def test_an_integration_is_loaded_when_it_is_named() -> None:
    code = "import narrowcast as nc; print(nc.integrations.transformers.NarrowcastConfig('int4').codec)"
    assert run(code).split() == ["int4"]


def test_an_integration_that_does_not_exist_names_those_that_do() -> None:
    with pytest.raises(AttributeError, match=r"'keras'. There are: accelerate, compressed_tensors, hf_trainer,"):
        _ = nc.integrations.keras


NEEDED = [
    ("transformers", "transformers", "hf"),
    ("compressed_tensors", "compressed_tensors", "hf"),
    ("accelerate", "accelerate", "hf"),
    ("transformers", "hf_trainer", "hf"),
    ("lightning", "lightning", "lightning"),
]


@pytest.mark.parametrize(("library", "module", "extra"), NEEDED)
def test_without_its_library_an_integration_says_what_to_install(library: str, module: str, extra: str) -> None:
    code = (
        f"import sys; sys.modules[{library!r}] = None\n"
        f"try:\n    import narrowcast.integrations.{module}\nexcept ImportError as error:\n    print(error)"
    )
    assert f"pip install 'narrowcast[{extra}]'" in run(code)
