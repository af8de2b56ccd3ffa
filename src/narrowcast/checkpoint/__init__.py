"""Rows in safetensors files: state dicts saved and loaded, whole checkpoints converted in bounded memory."""

from narrowcast.checkpoint.reading import Checkpoint, File, load_state, read
from narrowcast.checkpoint.saving import save_state

__all__ = ["Checkpoint", "File", "load_state", "read", "save_state"]
