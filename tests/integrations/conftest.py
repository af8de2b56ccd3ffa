"""Hugging Face's libraries need Python 3.11; on 3.10 the extra `hf` leaves them out.

Ranks are those of tests/distributed.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

HUGGING_FACE = ["test_compressed_tensors.py", "test_hf_trainer.py", "test_lazy.py", "test_transformers.py"]
HUGGING_FACE += ["test_sentence_transformers.py"]
collect_ignore = HUGGING_FACE if sys.version_info < (3, 11) else []
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parent.parent / "distributed"))
