"""Real ranks for these suites, too, and processes of their own: those of tests/distributed and tests/kernels."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent.parent / folder) for folder in ("distributed", "kernels")]
