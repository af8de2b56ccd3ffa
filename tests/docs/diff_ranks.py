"""Both sides of every diff, on every rank: `torchrun --nproc-per-node 2 diff_ranks.py diffs.json folder`.

diffs.json holds `[name, text]` pairs. What became of them is written to folder/RANK.json: by name, "" or what was
wrong. The names that the lines of a diff use come from the first of SETTINGS that fits it.
"""

from __future__ import annotations

import ast
import json
import sys
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

import narrowcast as nc
from narrowcast import distributed as ncd

Names = dict[str, Any]


class Blocks(nn.Module):
    """A model with blocks, as fully_shard wants them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def saved(compression: object) -> bool:
    """Whether gradients travelled in fewer bytes: int4 takes an eighth, and headers, scales and biases more."""
    return isinstance(compression, nc.GradientCompression) and compression.stats().ratio > 3


def batch() -> Tensor:
    return torch.randn(8, 64, generator=torch.Generator().manual_seed(dist.get_rank()))


# -- torch ------------------------------------------------------------------------------------------------------------


def ddp() -> Names:
    from torch.nn.parallel import DistributedDataParallel

    return {"model": Blocks(), "loader": [batch()], "DistributedDataParallel": DistributedDataParallel}


def fsdp() -> Names:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    return {"model": Blocks(), "loader": [batch()], "fully_shard": fully_shard, "mesh": mesh}


def trained(names: Names) -> bool:
    model = names["model"]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(batch()).square().mean().backward()
    optimizer.step()
    return saved(names["result"])


def tensors() -> Names:
    ncd.reset_stats()
    values = torch.linspace(-1, 1, 4096) * (dist.get_rank() + 1)
    return {"dist": dist, "ncd": ncd, "gradient": values.clone(), "tensor": values.clone()}


def summed(names: Names) -> bool:
    exact = torch.linspace(-1, 1, 4096) * 3  # of two ranks
    # int4 is off by 1/16 of each rank's 1 and 2, and of their sum: by 0.4. What was not added up is off by 1 or more.
    close = [(names[name] - exact).abs().max() < 0.5 for name in ("gradient", "tensor")]
    assert any(close), "neither tensor holds the sum"
    return "all_reduce" in ncd.stats() and ncd.stats()["all_reduce"].ratio > 3


# -- frameworks -------------------------------------------------------------------------------------------------------


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=96))


def pretrained() -> Names:
    from transformers import AutoModelForCausalLM

    from narrowcast.integrations.transformers import NarrowcastConfig

    folder = tempfile.mkdtemp()
    llama().save_pretrained(folder)
    return {"folder": folder, "AutoModelForCausalLM": AutoModelForCausalLM, "NarrowcastConfig": NarrowcastConfig}


def generated(names: Names) -> bool:
    names["model"].generate(torch.tensor([[5, 17, 3]]), max_new_tokens=2)
    return bool(nc.nn.encodings(names["model"]))


def lightning() -> Names:
    from lightning.pytorch import Trainer

    # The page's Trainer with as many ranks as there are, without files and pictures, for a step.
    here = {"devices": dist.get_world_size(), "accelerator": "cpu", "max_steps": 1, "logger": False}
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    return {"Trainer": lambda **given: Trainer(**{**given, **here, **quiet})}


def fitted(names: Names) -> bool:
    from lightning.pytorch import LightningModule

    class Network(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = Blocks()

        def training_step(self, rows: Tensor, index: int) -> Tensor:
            return self.layers(rows).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.1)

    trainer = names["trainer"]
    trainer.fit(Network(), torch.utils.data.DataLoader(torch.randn(64, 64), batch_size=8))
    assert trainer.global_step == 1
    return any(saved(getattr(callback, "compression", None)) for callback in trainer.callbacks)


def accelerate() -> Names:
    from accelerate import Accelerator

    model = Blocks()
    return {
        "accelerator": Accelerator(cpu=True),
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), 0.1),
        "loader": torch.utils.data.DataLoader(torch.randn(32, 64), batch_size=8),
    }


def accelerated(names: Names) -> bool:
    for rows in names["loader"]:
        names["accelerator"].backward(names["model"](rows).square().mean())
        names["optimizer"].step()
    return saved(names["result"])


def hugging_face() -> Names:
    from transformers import Trainer, TrainingArguments

    options = {"max_steps": 1, "per_device_train_batch_size": 2, "use_cpu": True, "disable_tqdm": True}
    args = TrainingArguments(tempfile.mkdtemp(), report_to=[], save_strategy="no", **options)
    data = [{"input_ids": row, "labels": row} for row in torch.randint(1, 96, (8, 16))]
    return {"Trainer": Trainer, "model": llama(), "args": args, "data": data}


def hugged(names: Names) -> bool:
    names["trainer"].train()
    callbacks = names["trainer"].callback_handler.callbacks
    return any(saved(getattr(callback, "compression", None)) for callback in callbacks)


class Setting(NamedTuple):
    """`names()` is what a side starts with. `done(names)` goes on with what it left, for a step if it trains, and says
    whether anything was compressed, which is right for the new side alone. `result` is what its last call gave."""

    fits: str
    needs: str
    names: Callable[[], Names]
    done: Callable[[Names], bool]


# The first whose words are in the diff, and the package without which it is skipped.
SETTINGS = [
    Setting("DistributedDataParallel(model)", "torch", ddp, trained),
    Setting("fully_shard(", "torch", fsdp, trained),
    Setting("dist.all_reduce(", "torch", tensors, summed),
    Setting("AutoModelForCausalLM.from_pretrained(folder", "transformers", pretrained, generated),
    Setting('Trainer(strategy="ddp"', "lightning", lightning, fitted),
    Setting("accelerator.prepare(", "accelerate", accelerate, accelerated),
    Setting("Trainer(model, args", "transformers", hugging_face, hugged),
]


def setting_of(diff: str) -> Setting:
    fits = [setting for setting in SETTINGS if setting.fits in diff]
    assert fits, "no setting fits it: add one to SETTINGS"
    return fits[0]


def missing(diff: str) -> str:
    """The package that a diff needs and that is not here, if so."""
    needs = setting_of(diff).needs
    return "" if find_spec(needs) else needs


def side_of(diff: str, mark: str) -> str:
    """The lines of one side: those with its mark, and those without any."""
    lines = diff.splitlines()
    assert all(line[:2] in ("  ", "+ ", "- ", "") for line in lines), "lines start with a mark or none, and a space"
    return "\n".join(line[2:] for line in lines if line[:1] in (mark, " ", ""))


def execute(code: str, names: Names) -> None:
    """Run the lines, with nothing in a loop that they leave open; what the last bare call gives becomes `result`."""
    try:
        tree = ast.parse(code)
    except IndentationError:
        tree = ast.parse(f"{code}\n    pass")
    for place, line in enumerate(tree.body):
        if isinstance(line, ast.Expr):
            tree.body[place] = ast.Assign([ast.Name("result", ast.Store())], line.value)
    names["result"] = None
    exec(compile(ast.fix_missing_locations(tree), "diff", "exec"), names)


def run(diff: str) -> None:
    """Run the old side, in which nothing may be compressed, and the new one, in which something must be."""
    setting = setting_of(diff)
    for mark in "-+":
        names = {"nc": nc, **setting.names()}
        execute(side_of(diff, mark), names)
        compressed = setting.done(names)
        assert compressed == (mark == "+"), f"side {mark}: compressed is {compressed}"
        dist.barrier()


def main(diffs: str, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    outcomes = {}
    for name, diff in json.loads(Path(diffs).read_text()):
        try:
            run(diff)
            outcomes[name] = ""
        except Exception:
            outcomes[name] = traceback.format_exc()
    Path(folder, f"{dist.get_rank()}.json").write_text(json.dumps(outcomes))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
