"""The impact is the exact decomposition of the grid."""

import itertools

import numpy as np
import pytest

from pytest_cudagraph.serving.tuning.impact import full_subgrid, impacts, noise_share

FACTORS = ("batch_size", "compile", "graph")
CELLS = list(itertools.product((1, 2, 4), ("none", "aot"), (False, True)))


def shares(cost):
    return {impact.name: impact.share for impact in impacts(FACTORS, {cell: cost(*cell) for cell in CELLS})}


def test_additive_effects_have_no_interaction_and_the_variance_of_each_as_share():
    found = shares(lambda batch, mode, graph: 3.0 * (batch == 4) + 1.0 * (mode == "aot"))
    of_batch, of_mode = 9.0 * 2 / 9, 0.25
    assert found["batch_size"] == pytest.approx(of_batch / (of_batch + of_mode))
    assert found["compile"] == pytest.approx(of_mode / (of_batch + of_mode))
    assert sum(found.values()) == pytest.approx(1.0)
    assert max(share for name, share in found.items() if " x " in name) < 1e-12


def test_a_pure_interaction_is_no_ones_own():
    found = shares(lambda batch, mode, graph: 1.0 if (mode == "aot") == graph else -1.0)
    assert found["compile x graph"] == pytest.approx(1.0)


def test_any_grid_adds_up_to_its_variance():
    values = dict(zip(CELLS, np.random.default_rng(0).normal(size=len(CELLS)), strict=True))
    assert sum(each.share for each in impacts(FACTORS, values)) == pytest.approx(1.0)


def test_equal_costs_and_single_levels_have_no_impact():
    assert shares(lambda *cell: 2.0) == {}
    assert [each.name for each in impacts(FACTORS, {(1, "none", graph): float(graph) for graph in (0, 1)})] == ["graph"]


def test_the_noise_share_is_the_error_of_the_medians():
    rng = np.random.default_rng(0)
    readings = {(i,): list(rng.normal(size=100) * 0.1 + i) for i in range(4)}
    assert noise_share(readings) == pytest.approx(np.pi / 2 * 0.01 / 100 / 1.25, rel=0.3)
    assert noise_share({(0,): [1.0, 1.0], (1,): [1.0, 1.0]}) == 1.0


def test_a_level_with_missing_cells_is_left_out():
    missing = [cell for cell in CELLS if cell[1] != "aot" or not cell[2]]
    kept, left_out = full_subgrid(missing)
    assert len(kept) == 6
    assert left_out in ([(1, "aot")], [(2, True)])
    assert full_subgrid(CELLS) == (CELLS, [])
    assert full_subgrid([]) == ([], [])
