"""Quantize a language model, save it, load it into an empty one, and let it write.

    python examples/quantize_and_generate.py [--codec int4] [--steps 300]        # trains a small GPT first, offline
    python examples/quantize_and_generate.py --model FOLDER_OR_NAME              # a Hugging Face model instead

The second needs `pip install 'narrowcast[hf]'`.
"""

import argparse
import tempfile
import time
from itertools import islice
from pathlib import Path

import torch

import narrowcast as nc
from narrowcast.byte_gpt import ByteGPT, batches, loss_of, stdlib_text

PROMPT = "def read(self, "


def trained(steps: int) -> ByteGPT:
    """A small GPT that has read some of the standard library."""
    model = ByteGPT()
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    for step, (inputs, targets) in enumerate(islice(batches(stdlib_text(), 128, 8, seed=0), steps), 1):
        loss = loss_of(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0 or step == steps:
            print(f"step {step}: loss {loss.item():.3f}")
    return model.eval()


def small(codec: str, steps: int) -> None:
    """Train, quantize, save, load, write."""
    model = trained(steps)
    before = sum(parameter.nbytes for parameter in model.parameters())
    print(nc.quantize_(model, codec))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        nc.save(model, path)
        print(f"{path.name}: {path.stat().st_size:,} bytes, in place of {before:,}")
        with torch.device("meta"):
            empty = ByteGPT()
        model = nc.load(path, empty).eval()
    start = time.perf_counter()
    written = model.generate(PROMPT.encode(), 200, temperature=0.6)
    print(PROMPT + written.decode(errors="replace"))
    print(f"\n{200 / (time.perf_counter() - start):.0f} bytes a second")


def large(codec: str, name: str) -> None:
    """A model of transformers, quantized while it loads."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from narrowcast.integrations.transformers import NarrowcastConfig

    tokenizer = AutoTokenizer.from_pretrained(name)
    model = AutoModelForCausalLM.from_pretrained(name, quantization_config=NarrowcastConfig(codec))
    print(f"{model.get_memory_footprint():,} bytes")
    inputs = tokenizer(PROMPT, return_tensors="pt").to(model.device)
    print(tokenizer.decode(model.generate(**inputs, max_new_tokens=60)[0]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--codec", default="int4")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--model", help="a folder, or a name on the Hugging Face hub")
    options = parser.parse_args()
    torch.manual_seed(0)
    if options.model:
        large(options.codec, options.model)
    else:
        small(options.codec, options.steps)


if __name__ == "__main__":
    main()
