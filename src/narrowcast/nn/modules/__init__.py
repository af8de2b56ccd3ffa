"""Modules of torch.nn that hold encoded rows."""
