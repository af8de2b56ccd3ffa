"""A small runner of decoders: how many tokens a second encoded weights are worth, end to end.

shape.py      Shape: what a checkpoint's config.json says of a Llama-like model; two shapes for random weights
decoder.py    Decoder: the modules, under the names that checkpoints of transformers have
rotary.py     the angles by which queries and keys are turned
cache.py      the keys and values of every position so far, in memory of a fixed size
kernels.py    what is done between products: in plain torch, or in kernels for one token (the core's, Triton's)
layers.py     all layers in one call of the compiled core, on a CPU
fuse.py       products that share an input, as one product on joined rows
sampling.py   the choice of the next token
steps.py      one token after the other: eager, or one CUDA graph
checks.py     decoders that a generation refuses
run.py        prompts in, tokens out, one step at a time, and what it took
load.py       a folder of transformers, quantized or not, or random weights, to a Decoder

Not a serving engine: the sequences of a batch begin together, none joins later, and one device holds the model.
"""

from narrowcast.generate.decoder import Decoder
from narrowcast.generate.fuse import fuse_
from narrowcast.generate.load import load_decoder, random_decoder
from narrowcast.generate.run import Generation, generate
from narrowcast.generate.sampling import Sampling
from narrowcast.generate.shape import SHAPES, Shape

__all__ = [
    "SHAPES",
    "Decoder",
    "Generation",
    "Sampling",
    "Shape",
    "fuse_",
    "generate",
    "load_decoder",
    "random_decoder",
]
