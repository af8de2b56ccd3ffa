"""Rows in safetensors files: state dicts saved and loaded, whole checkpoints converted in bounded memory."""

from narrowcast.checkpoint.companions import declared_weights
from narrowcast.checkpoint.mapping import File
from narrowcast.checkpoint.reading import Checkpoint, load_state, read
from narrowcast.checkpoint.saving import save_state
from narrowcast.checkpoint.selection import module_name

__all__ = ["Checkpoint", "File", "declared_weights", "load_state", "module_name", "read", "save_state"]
