"""`narrowcast generate`: a model on encoded weights writes text, and says how fast."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from narrowcast.cli.shared.failing import refuse

if TYPE_CHECKING:
    from narrowcast.generate import Decoder, Generation
    from narrowcast.integrations.text import Text

DTYPES = ("bfloat16", "float32", "float16")
RANDOM = "In place of FOLDER: random weights of this shape (110m, 1b, 7b). Their speed is real, their text is not."


def generate(
    folder: Annotated[
        Path | None, typer.Argument(metavar="FOLDER", help="A model of transformers, quantized or not.")
    ] = None,
    prompt: Annotated[list[str] | None, typer.Option(help="A text to continue. Several make a batch.")] = None,
    random: Annotated[str | None, typer.Option(help=RANDOM)] = None,
    codec: Annotated[str | None, typer.Option(help="Quantize float weights to this codec first.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to write for each prompt.")] = 128,
    temperature: Annotated[float, typer.Option(help="0: the most likely token each time.")] = 0.0,
    top_k: Annotated[int | None, typer.Option(help="Draw from so many of the likeliest tokens.")] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Draw from the likeliest tokens that have this probability.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the draws.")] = 0,
    batch: Annotated[int, typer.Option(help="With --random: sequences that are written at once.")] = 1,
    dtype: Annotated[str | None, typer.Option(help=f"Of activations: {', '.join(DTYPES)}.")] = None,
    device: Annotated[str, typer.Option(help="cpu, or cuda.")] = "cpu",
    fuse: Annotated[bool, typer.Option(help="Join products that share an input.")] = True,
    cuda_graph: Annotated[bool, typer.Option(help="With cuda: replay a captured step instead of launching it.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of the text as it is written.")] = False,
) -> None:
    """Let a Llama-like model write, with its weights encoded, and print tokens per second.

    Text of one prompt is printed while it is written. Figures go to stderr.

    Example: narrowcast generate llama-int4/ --prompt "Once upon a time" --temperature 0.7
    """
    _check(folder, random, prompt, dtype, batch)

    from narrowcast.generate import Sampling, fuse_
    from narrowcast.generate import generate as begin

    sampling = Sampling(temperature, top_k, top_p, seed)
    decoder, text = _decoder(folder, random, dtype, device), None
    if folder is not None:
        text = _tokenizer(folder)
    skipped = _quantize(decoder, codec)
    if fuse:
        skipped |= fuse_(decoder).skips
    prompts = [_tokens(text, one) for one in prompt or []] if text else [[1, 2, 3, 4]] * batch
    generation = begin(decoder, prompts, max_new_tokens, sampling, stop_at_end=text is not None, cuda_graph=cuda_graph)
    if as_json:
        generation.run()
        print(json.dumps(_summary(decoder, generation, text, skipped)))
        return
    _write(generation, text, prompt or [])
    for line in _skips(skipped):
        print(line, file=sys.stderr)
    print(_figures(decoder, generation), file=sys.stderr)


def _check(folder: Path | None, random: str | None, prompt: list[str] | None, dtype: str | None, batch: int) -> None:
    if (folder is None) == (random is None):
        refuse("FOLDER: name a model's folder, or --random with a shape such as 110m; one of the two.")
    if folder is not None and not folder.is_dir():
        what = "is a file. Name the folder that it is in." if folder.exists() else "no such folder. Check the path."
        refuse(f"FOLDER={str(folder)!r}: {what}")
    if folder is not None and not prompt:
        refuse('--prompt: there is nothing to continue. Write, for example, --prompt "Once upon a time".')
    if random is not None and prompt:
        refuse("--prompt: random weights have no tokenizer. Leave it out, or name a folder.")
    if batch < 1 or (batch > 1 and folder is not None):
        refuse(f"--batch {batch}: at least 1, and only with --random. With a folder, give --prompt several times.")
    if dtype is not None and dtype not in DTYPES:
        refuse(f"--dtype {dtype!r}: is none of {', '.join(DTYPES)}.")


def _decoder(folder: Path | None, random: str | None, dtype: str | None, device: str) -> Decoder:
    import torch

    from narrowcast.generate import SHAPES, load_decoder, random_decoder

    kind = None if dtype is None else getattr(torch, dtype)
    if device != "cpu" and not (device.startswith("cuda") and torch.cuda.is_available()):
        refuse(f"--device {device!r}: expected cpu, or cuda where torch finds a GPU.")
    if folder is not None:
        return load_decoder(folder, dtype=kind, device=device)
    if random not in SHAPES:
        refuse(f"--random {random!r}: is none of {', '.join(SHAPES)}.")
    return random_decoder(SHAPES[random], dtype=kind or torch.bfloat16, device=device)


def _tokenizer(folder: Path) -> Text:
    try:
        from narrowcast.integrations.text import Text
    except ImportError:
        refuse("FOLDER: reading its tokenizer needs transformers. Run: pip install 'narrowcast[hf]'")
    return Text(folder)


def _quantize(decoder: Decoder, codec: str | None) -> dict[str, str]:
    """Quantize what is float; which weights were left, and why."""
    if codec is None:
        return {}

    from narrowcast.nn import quantize_

    return {skip.name: skip.reason for skip in quantize_(decoder, codec).skips}


def _tokens(text: Text, prompt: str) -> list[int]:
    tokens = text.encode(prompt)
    if not tokens:
        refuse(f"--prompt {prompt!r}: this model's tokenizer makes no token of it. Write at least one word.")
    return tokens


def _skips(skipped: dict[str, str]) -> list[str]:
    """What was left as it was: a line for each reason."""
    names: dict[str, list[str]] = {}
    for name, why in skipped.items():
        names.setdefault(why, []).append(name)
    more = {why: f" and {len(of) - 1} more" if len(of) > 1 else "" for why, of in names.items()}
    return [f"{of[0]}{more[why]}: left as they were, since {why}" for why, of in names.items()]


def _write(generation: Generation, text: Text | None, prompts: list[str]) -> None:
    """Print the text of one prompt as it is written, of several at the end."""
    if text is None or len(prompts) > 1:
        generation.run()
        for one, tokens in zip(prompts, generation.tokens, strict=False):
            print(f"{one}{text.decode(tokens) if text else ''}\n")
        return

    from narrowcast.integrations.text import Stream

    stream = Stream(text)
    print(prompts[0], end="", flush=True)
    for (token,) in generation:
        if token is not None:
            print(stream.add(token), end="", flush=True)
    print(stream.end())


def _summary(decoder: Decoder, generation: Generation, text: Text | None, skipped: dict[str, str]) -> dict[str, Any]:
    return {
        "texts": [text.decode(tokens) for tokens in generation.tokens] if text else [],
        "tokens": [len(tokens) for tokens in generation.tokens],
        "first_token_seconds": generation.prefill_seconds,
        "tokens_per_second": generation.tokens_per_second,
        "weight_bytes": decoder.weight_bytes,
        "cache_bytes": generation.cache_bytes,
        "left_as_they_were": skipped,
    }


def _figures(decoder: Decoder, generation: Generation) -> str:
    written = sum(len(tokens) for tokens in generation.tokens)
    return (
        f"{written} tokens; the first after {generation.prefill_seconds:.3f} s, then "
        f"{generation.tokens_per_second:.1f} tokens/s; weights {decoder.weight_bytes / 1e6:.1f} MB, "
        f"cache {generation.cache_bytes / 1e6:.1f} MB"
    )
