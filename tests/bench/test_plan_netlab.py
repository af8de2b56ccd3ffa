"""Plans on a network in a box: what was predicted is what it takes."""

from __future__ import annotations

import pytest
from netlab_run import networked

import plan

pytestmark = pytest.mark.timeout(120)


@networked
def test_predictions_at_100_mbit_are_within_a_quarter_of_what_it_takes() -> None:
    seen = []
    for _ in range(3):  # a shared machine may be busy with something else for a while
        found = plan.rows("2x100mbit", plan.run("2x100mbit", ["int8", "int4"], 3, (1 << 21,)))
        seen.append({row["codec"]: round(row["predicted"] / row["best"], 2) for row in found})
        if all(0.75 <= ratio <= 1.25 for ratio in seen[-1].values()):
            # On a link so slow, bytes are all that counts.
            assert [row["codec"] for row in found if row["chosen"]] == ["int4"]
            return
    pytest.fail(f"predicted over measured, in three tries: {seen}")
