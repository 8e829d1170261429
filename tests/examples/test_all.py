"""What examples have in common: mistakes are told before anything starts, and a stop ends them."""

import importlib
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import launchpad_lite as lp
from examples.parameter_server.program import Regression
from launchpad_lite.testing import poll_until


@pytest.mark.parametrize(
    ("example", "options", "mistake"),
    [
        ("actor_learner", {"num_actors": 0}, "actor_learner needs at least one actor"),
        ("actor_learner", {"num_actors": 4, "steps_per_update": 3}, "a step of each"),
        ("actor_learner", {"episodes": 0}, "at least one episode"),
        ("actor_learner", {"max_seconds": float("nan")}, "some time"),
        ("actor_learner", {"target": 501}, "500 at most, never 501"),
        ("actor_learner", {"seed": -1}, "0 or more, not -1"),
        ("control_agent", {"num_actors": 0}, "at least one actor, one replica"),
        ("control_agent", {"num_replicas": 3}, "3 replicas cannot share a batch of 128 evenly"),
        ("evolution_strategies", {"num_evaluators": 0}, "at least one evaluator"),
        ("evolution_strategies", {"function": "cube"}, "there are: sphere, rosenbrock, rastrigin"),
        ("evolution_strategies", {"dimension": 1}, "at least 2 dimensions"),
        ("evolution_strategies", {"population": 3}, "a population of 4"),
        ("inference_server", {"num_actors": 0}, "at least one actor, not 0"),
        ("inference_server", {"episodes": 0}, "at least one episode, not 0"),
        ("inference_server", {"batch_size": 0}, "at least one observation in a batch, not 0"),
        ("inference_server", {"timeout_ms": -1}, "an observation cannot wait for -1 ms"),
        ("inference_server", {"timeout_ms": float("nan")}, "cannot wait for nan ms"),
        ("inference_server", {"cost_ms": -1}, "a batch cannot take -1 ms"),
        ("parameter_server", {"num_requesters": 0}, "at least one requester, not 0"),
        ("parameter_server", {"num_servers": 0}, "at least one server, not 0"),
        ("parameter_server", {"num_cachers": -1}, "at least one cacher, not -1"),
        ("parameter_server", {"steps": 0}, "at least one step, not 0"),
        ("parameter_server", {"batch_size": 0}, "at least one sample in a batch, not 0"),
        ("parameter_server", {"topology": "ring"}, "there are: single, replicated, cached"),
        (
            "parameter_server",
            {"topology": "replicated", "num_requesters": 2, "num_servers": 3},
            "each of 3 servers needs a requester that trains it, and there are only 2",
        ),
        (
            "parameter_server",
            {"topology": "cached", "refresh_s": 5, "stale_s": 1},
            "stale_s=1 is below refresh_s=5",
        ),
        ("reasoning", {"mode": "both"}, "mode is sync or async, not 'both'"),
        ("replay", {"num_actors": 0}, "at least one actor"),
        ("replay", {"samples_per_insert": 0}, "a ratio above 0"),
        ("replay", {"episodes": 0}, "one episode"),
        ("replay", {"target": 501}, "out of reach"),
    ],
)
def test_mistakes_are_found_before_anything_starts(
    example: str, options: dict[str, Any], mistake: str
) -> None:
    program = importlib.import_module(f"examples.{example}.program")
    with pytest.raises(ValueError, match=re.escape(mistake)):
        program.make_program(**options)


def test_a_regression_needs_as_many_samples_as_weights() -> None:
    with pytest.raises(ValueError, match="dimension=3 and samples=2"):
        Regression(dimension=3, samples=2)


@pytest.mark.parametrize(
    ("example", "flags", "words"),
    [
        ("actor_learner", ["--actors=0"], "at least one actor"),
        ("control_agent", ["--replicas=0"], "at least one actor, one replica"),
        ("evolution_strategies", ["--chaos=1", "--launcher=local_mt"], "--chaos kills processes"),
        ("inference_server", ["--actors=0"], "inference_server needs at least one actor, not 0"),
        ("parameter_server", ["--requesters=0"], "needs at least one requester, not 0"),
    ],
)
def test_a_script_explains_bad_flags(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, example: str, flags: list[str], words: str
) -> None:
    script = importlib.import_module(f"examples.{example}.launch")
    monkeypatch.setattr(sys, "argv", ["launch", *flags])
    with pytest.raises(SystemExit, match="2"):
        script.main()
    shown = capsys.readouterr()
    assert shown.out == ""
    assert words in shown.err


@pytest.mark.parametrize(
    ("example", "options", "label", "works"),
    [
        (
            "evolution_strategies",
            {"tolerance": 0, "cost_ms": 1, "num_evaluators": 2},
            "evaluator",
            lambda evaluator: evaluator.ready() is None,
        ),
        (
            "inference_server",
            {"num_actors": 2, "episodes": 10**6},
            "inference",
            lambda inference: inference.batches(),
        ),
        (
            "parameter_server",
            {"topology": "cached", "num_requesters": 2, "steps": 10**9},
            "server",
            lambda server: server.served().pushes,
        ),
    ],
)
def test_a_program_that_is_stopped_ends_in_time_and_writes_no_result(
    launch_program: Any,
    tmp_path: Path,
    example: str,
    options: dict[str, Any],
    label: str,
    works: Callable[[Any], Any],
) -> None:
    program = importlib.import_module(f"examples.{example}.program")
    output = tmp_path / "result.json"
    made = program.make_program(output=output, **options)
    running = launch_program(made, "test_mt", notice_s=30)
    client = running.client(label)
    poll_until(lambda: works(client))
    result = running.stop()
    assert (result.outcome, result.killed) == (lp.Outcome.STOPPED, ())
    assert not output.exists()
