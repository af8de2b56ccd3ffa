"""How weights are rounded."""
