"""How often the tuner's choice is worse than the best cell, on simulated grids with a known truth.

A grid has 24 cells: batch size 1, 2, 4, 8, three compile modes, with and without a graph. The cost per row is the sum
of effects and an interaction, with normal noise of 3 or 15 % and bursts in 5 % of the samples. Weak effects are 0.15 of
the others, so that many cells are within some percent. The race is the product's own. A grid of one sample, and one of
15 samples for each cell, are shown beside it. Time is not simulated: a race ends after 400 rounds. Exits 1 if the
race's choice is more than 2 % worse than the best in more than one of 200 trials of a setting.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import statistics
import sys
from collections.abc import Callable

from pytest_cudagraph.serving.tuning.race import RaceResult, race

CELLS = list(itertools.product((1, 2, 4, 8), ("none", "inductor", "aot"), (False, True)))
MOST_REGRET, MOST_WRONG = 0.02, 0.005
ROUNDS = 400
TOLERANCE = 0.02
Cell = tuple[int, str, bool]


def truth(cell: Cell, effect: float) -> float:
    """The logarithm of the cost per row."""
    batch, compile_mode, graph = cell
    code = {"none": 0.0, "inductor": -0.10, "aot": -0.12}[compile_mode]
    interaction = 0.03 if compile_mode == "aot" and graph else 0.0
    return effect * (-0.55 * math.log2(batch) + code + (-0.45 / batch if graph else 0.0) + interaction)


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--trials", type=int, default=200)
    trials = arguments.parse_args().trials
    is_wrong = False
    for effect, noise in itertools.product((1.0, 0.15), (0.03, 0.15)):
        best = min(truth(cell, effect) for cell in CELLS)
        print(f"effects x {effect}, noise {noise:.0%}, {trials} trials:")
        for name, choose in (("race", _race), ("grid, 1 sample", _grid(1)), ("grid, 15 samples", _grid(15))):
            found = [choose(_sampler(effect, noise, random.Random(seed)), seed) for seed in range(trials)]
            regrets = [math.expm1(truth(cell, effect) - best) for cell, _ in found]
            wrong = sum(regret > MOST_REGRET for regret in regrets) / trials
            samples = statistics.median(count for _, count in found)
            print(f"  {name:<17} worse by over 2 %: {wrong:6.1%}, mean regret {statistics.fmean(regrets):7.3%}, "
                  f"worst {max(regrets):6.1%}, samples {samples:.0f}")  # fmt: skip
            is_wrong |= name == "race" and wrong > MOST_WRONG
    return int(is_wrong)


def _sampler(effect: float, noise: float, rng: random.Random) -> Callable[[Cell], float]:
    def sample(cell: Cell) -> float:
        burst = rng.expovariate(2) if rng.random() < 0.05 else 0.0
        return math.exp(truth(cell, effect) + rng.gauss(0.0, noise) + burst)

    return sample


def _race(sample: Callable[[Cell], float], seed: int) -> tuple[Cell, int]:
    """As the tuner does it: a race for each batch size, then one of their winners, each at half of the tolerance."""

    def one_race(cells: list[Cell]) -> RaceResult[Cell]:
        return race(cells, sample, is_over=lambda rounds: rounds >= ROUNDS, seed=seed, tolerance=TOLERANCE / 2)

    heats = [one_race([cell for cell in CELLS if cell[0] == batch]) for batch in (1, 2, 4, 8)]
    final = one_race([heat.best for heat in heats])
    return final.best, final.samples + sum(heat.samples for heat in heats)


def _grid(count: int) -> Callable[[Callable[[Cell], float], int], tuple[Cell, int]]:
    def choose(sample: Callable[[Cell], float], seed: int) -> tuple[Cell, int]:
        medians = {cell: statistics.median(sample(cell) for _ in range(count)) for cell in CELLS}
        return min(CELLS, key=medians.__getitem__), count * len(CELLS)

    return choose


if __name__ == "__main__":
    sys.exit(main())
