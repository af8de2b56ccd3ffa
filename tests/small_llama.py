"""A Llama of a few thousand weights, made on the spot; `write_bytewise` saves one of bytes and its tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "pad_token_id": 0,
}
TOKENS = torch.tensor([[5, 17, 3, 88, 42, 9]])


def llama(tied: bool = False, **options: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SMALL | options, tie_word_embeddings=tied)).eval()


def write_bytewise(path: Path, *, layers: int = 1, max_shard_size: str = "5GB") -> None:
    """A folder with a model whose tokens are bytes. A character outside of ASCII takes several."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(path)
    options = {"vocab_size": 256, "pad_token_id": None, "eos_token_id": None, "max_position_embeddings": 256}
    llama(num_hidden_layers=layers, **options).save_pretrained(path, max_shard_size=max_shard_size)
