import random
import re

import pytest

from examples.architecture_search.program import LAYERS, MOST_LAYERS, Module, first, network
from tests.engines import needs_torch
from tests.examples.running import run_example


def test_a_mutation_appends_a_layer_or_changes_nothing() -> None:
    rng = random.Random(0)
    module = first(rng)
    for _ in range(50):
        child = module.mutate(rng)
        assert child == module or child.layers[:-1] == module.layers
        module = child
    assert len(module) == MOST_LAYERS


def test_a_crossover_recombines_two_modules() -> None:
    rng = random.Random(0)
    one, other = Module(("1x1",) * 4), Module(("5x5",) * 4)
    for _ in range(20):
        children = one.crossover(other, rng)
        for child, begin, end in zip(children, ("1x1", "5x5"), ("5x5", "1x1"), strict=True):
            assert 1 <= len(child) <= MOST_LAYERS
            assert re.fullmatch(f"({begin} )+({end} )*", f"{' '.join(child.layers)} ")


@needs_torch
@pytest.mark.slow
@pytest.mark.parametrize("layer", LAYERS)
def test_each_layer_makes_a_network_that_scores_ten_digits(layer: str) -> None:
    import torch

    model = network(Module((layer, layer)))
    assert model(torch.zeros(3, 1, 8, 8)).shape == (3, 10)


@needs_torch
@pytest.mark.slow
def test_the_search_finds_a_network_though_workers_are_killed() -> None:
    done = run_example("architecture_search", "--trials=16", "--epochs=2", "--die=0.05")
    assert done.returncode == 0, done.stderr
    assert "16 networks in" in done.stdout
