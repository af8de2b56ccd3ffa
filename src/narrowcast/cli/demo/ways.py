"""The ways in which the demo trains."""

from __future__ import annotations

WAYS = {"fp32": "fp32", "int8": "int8", "int4": "int4, error feedback"}
"""The codecs of the gradients, and their titles."""
