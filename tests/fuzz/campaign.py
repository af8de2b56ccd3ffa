"""How long the campaigns of this folder last.

Each test draws its cases with hypothesis. In `make test` they are few and the same each time, a minute for all of them;
`make soak` draws other ones, 60 times as many. A case that once failed stays as an `@example` above its test.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

FACTOR = int(os.environ.get("NARROWCAST_FUZZ", "1"))


def campaign(examples: int) -> settings:
    """The settings of a test that draws so many cases in `make test`."""
    return settings(
        max_examples=examples * FACTOR,
        derandomize=FACTOR == 1,
        database=None,
        deadline=None,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )
