"""The byte-level GPT in Lightning: one callback sends the gradients in 4 bits.

    python examples/lightning_train.py [--codec int4] [--devices 2] [--steps 50]

Needs `pip install 'narrowcast[lightning]'`. Lightning starts the other ranks itself.
"""

import argparse
from collections.abc import Iterator

import lightning
import torch
from torch.utils.data import DataLoader, IterableDataset

from narrowcast.byte_gpt import ByteGPT, GPTConfig, batches, loss_of, stdlib_text
from narrowcast.integrations.lightning import CompressGradients


class Text(IterableDataset):
    """Batches of the standard library's source; each rank draws its own."""

    def __init__(self, context: int, batch: int) -> None:
        self.context, self.batch = context, batch

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        return batches(stdlib_text(), self.context, self.batch, seed=0, rank=rank)


class Model(lightning.LightningModule):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.gpt = ByteGPT(config)

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], index: int) -> torch.Tensor:
        loss = loss_of(self.gpt(batch[0]), batch[1])
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--codec", default="int4")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8, help="of each rank")
    options = parser.parse_args()

    compress = CompressGradients(options.codec)
    trainer = lightning.Trainer(
        accelerator="auto" if torch.cuda.device_count() >= options.devices else "cpu",
        devices=options.devices,
        strategy="ddp",
        max_steps=options.steps,
        callbacks=[compress],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    model = Model(GPTConfig(options.layers, options.width))
    data = DataLoader(Text(model.gpt.config.context, options.batch), batch_size=None)
    trainer.fit(model, data)
    if trainer.is_global_zero and compress.compression is not None:
        stats = compress.compression.stats()
        sent, plain = stats.sent_bytes / 1e6, stats.plain_bytes / 1e6
        print(f"sent {sent:.1f} MB a rank in place of {plain:.1f}: {stats.ratio:.1f}x")


if __name__ == "__main__":
    main()
