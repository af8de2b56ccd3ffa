"""Optimizers whose momentum can travel, under the names of torch.optim.

optimizer = narrowcast.optim.AdamW(model.parameters(), lr=1e-3)    # torch.optim.AdamW, to the bit
"""

from narrowcast.optim.adamw import AdamW

__all__ = ["AdamW"]
