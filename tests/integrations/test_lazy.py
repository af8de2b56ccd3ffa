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


def test_without_its_library_an_integration_says_what_to_install() -> None:
    needed = {
        "accelerate": ("accelerate", "hf"),
        "compressed_tensors": ("compressed_tensors", "hf"),
        "hf_trainer": ("transformers", "hf"),
        "lightning": ("lightning", "lightning"),
        "onnx": ("onnxscript", "onnx"),
        "transformers": ("transformers", "hf"),
    }
    code = (
        f"import sys, importlib; sys.modules.update(dict.fromkeys({[library for library, _ in needed.values()]!r}))\n"
        f"for module in {list(needed)!r}:\n"
        "    try:\n        importlib.import_module(f'narrowcast.integrations.{module}')\n"
        "    except ImportError as error:\n        print(error)"
    )
    said = run(code).splitlines()
    assert sorted(needed) == nc.integrations.__all__
    for (module, (_, extra)), words in zip(needed.items(), said, strict=True):
        assert words.startswith(f"narrowcast.integrations.{module} needs ")
        assert f"pip install 'narrowcast[{extra}]'" in words
