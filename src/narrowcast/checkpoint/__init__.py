"""Rows in safetensors files: state dicts saved and loaded, whole checkpoints converted in bounded memory."""

from narrowcast.checkpoint.reading import Checkpoint, File, load_state, read, rows_or_tensor
from narrowcast.checkpoint.saving import save_state

__all__ = ["Checkpoint", "File", "load_state", "read", "rows_or_tensor", "save_state"]
