"""How much each weight loses to each codec, and the best codec for each under a size.

`measure` reads one weight in tiles and returns its `Statistics`; `plan` turns those of a whole model into one codec per
weight. Nothing here knows files or modules: `narrowcast inspect` brings the tiles and writes the rules.
"""

from narrowcast.sensitivity.knapsack import Mix, best_mix
from narrowcast.sensitivity.plans import Plan, plan
from narrowcast.sensitivity.statistics import Statistics, measure

__all__ = ["Mix", "Plan", "Statistics", "best_mix", "measure", "plan"]
