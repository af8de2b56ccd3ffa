"""Helper modules of this folder, for the suites in the folders below it, too."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
