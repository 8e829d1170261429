"""What nodes of engines, searches, replicas and rollouts show of themselves."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest

import launchpad_lite as lp
from launchpad_lite import engines, replicas, rollouts, search
from launchpad_lite.insight.dashboard import ProgramPage
from launchpad_lite.launching.registry import Inspector
from launchpad_lite.testing import LaunchedProgram, poll_until
from tests.launchpad_lite.search.tasks_for_tests import QUICK, squares

pytestmark = pytest.mark.slow


class Sum(engines.ParameterServer):
    def initial(self) -> Mapping[Any, Any]:
        return {"a": 0}

    def push(self, worker: str, values: Mapping[Any, Any]) -> Mapping[Any, Any]:
        lp.wait_for_stop(0.01)
        return {"a": 1}


class Peers(engines.PeerToPeer):
    def initial(self) -> Mapping[Any, Any]:
        return {"a": 0}

    def schedule(self) -> list[Any]:
        return ["a"]

    def push(self, values: dict[Any, Any]) -> Mapping[Any, Any]:
        lp.wait_for_stop(0.01)
        return {"a": 1}


class Generator:
    def generate(self, prompt: int, weights: Any) -> int:
        return prompt


def _train(made: rollouts.RolloutsClient) -> None:
    made.publish({})
    for _ in made.batches(2):
        made.publish({})


def _reduce(repl: Any) -> None:
    for _ in repl.run(lambda: repl.all_sum(1), steps=5):
        pass
    lp.wait_for_stop()


def _count(mr: engines.MapReduce) -> None:
    mr.load(range(10)).count()
    lp.wait_for_stop()


def test_nodes_of_our_engines_show_how_far_they_are(
    launch_program: Callable[..., LaunchedProgram],
) -> None:
    program = lp.Program("viewed")
    Sum().add_to(program, workers=2, progress_s=None)
    Peers().add_to(program, peers=2)
    search.add_to(program, squares(4), workers=1, timing=QUICK)
    made = rollouts.Rollouts(list(range(6))).add_to(program, generator=Generator, generators=1)
    program.add_node(lp.PyNode(_train, made), label="trainer")
    program.add_node(rollouts.ReplayNode([rollouts.Table(max_size=10)]), label="replay")
    replicas.MultiWorkerReplicator(2).add_to(program, _reduce)
    mr = engines.MapReduce.add_to(program, workers=1)
    program.add_node(lp.PyNode(_count, mr), label="count")
    launched = launch_program(program, "test_mp")
    folder = launched.running.log_dir
    page = ProgramPage(Inspector(launched.running), folder)
    expected = {
        "engine": (" updates", " steps", "stage 1/"),
        "engine/workers-by-steps": ("ps_server[0]\n",),
        "replay": ("main: 0 items; 0 inserted",),
        "replica": ("5 steps", "collective 1"),
        "rollouts": ("6 trained",),
        "rollouts/groups-by-staleness": ("0 █",),
        "search": ("4 done", "best 9"),
    }

    def lacks(views: Mapping[str, str]) -> list[tuple[str, str]]:
        return [
            (name, part)
            for name, parts in expected.items()
            for part in parts
            if part not in views.get(name, "")
        ]

    poll_until(lambda: not lacks(page.curves()["views"]))
    launched.stop()
    assert lacks(ProgramPage(None, folder).curves()["views"]) == []
