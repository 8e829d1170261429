"""Searches whose nodes are killed at random, as processes."""

import collections
import contextlib
import dataclasses
import os
import pickle
import random
import signal
from pathlib import Path

import pytest

import courier
import launchpad_lite as lp
from launchpad_lite import search
from launchpad_lite.search._parts import RESTART, BrokerOptions, add_parts
from launchpad_lite.testing import poll_until
from tests.launchpad_lite.search.tasks_for_tests import QUICK, Counting

WORKERS = 3


class Played:
    """A search whose nodes were killed, from its beginning to its end."""

    def __init__(
        self,
        tmp_path: Path,
        groups: tuple[str, ...],
        *,
        total: int,
        pause_s: float,
        every_s: float,
        brokers: int = 2,
        kills: int = 20,
    ) -> None:
        """Runs it: so many tasks, of `pause_s` each; a node of the groups is killed `every_s`.

        At most so many `kills`: where nodes start slowly, more would keep the rest from working.
        """
        self.kills: collections.Counter[str] = collections.Counter()
        notes = tmp_path / "notes"
        program = lp.Program("kills")
        model = Counting(total, notes, pause_s)
        search.add_to(
            program,
            model,
            workers=WORKERS,
            brokers=brokers,
            folder=tmp_path / "brokers",
            max_losses=1000,
            # A model with one broker waits for it.
            timing=dataclasses.replace(QUICK, patience_s=QUICK.patience_s if brokers > 1 else 60.0),
        )
        again = lp.RestartPolicy(
            "on_failure", max_restarts=10_000, backoff_s=0.05, max_backoff_s=0.2
        )
        checkpoints = lp.Checkpoints(tmp_path / "model", period_s=0.5)
        rng = random.Random(0)
        with lp.launch(
            program, "test_mp", restart=again, checkpoints={"search_model": checkpoints}
        ) as running:
            while not running.join(every_s):
                if self.kills.total() < kills:
                    self._kill(running, groups, rng)
            self.outcome = running.wait().outcome
        newest = max(
            (tmp_path / "model").rglob("model.pickle"), key=lambda path: path.stat().st_mtime
        )
        with newest.open("rb") as file:
            _, (model, *_) = pickle.load(file), pickle.load(file)
        self.told = model.told
        self.runs = collections.Counter(map(int, notes.read_text().split()))

    def _kill(
        self, running: lp.RunningProgram, groups: tuple[str, ...], rng: random.Random
    ) -> None:
        group = f"search_{rng.choice(groups)}"
        nodes = [
            node
            for node in running.status()
            if node.name.startswith(group) and node.pid and node.state in ("running", "serving")
        ]
        if nodes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rng.choice(nodes).pid or 0, signal.SIGKILL)
                self.kills[group] += 1


@pytest.mark.slow
def test_a_task_runs_once_if_no_worker_is_lost_whoever_else_is(tmp_path: Path):
    played = Played(
        tmp_path, ("broker", "name_server"), total=600, pause_s=0.03, every_s=0.4, brokers=1
    )
    assert played.kills.total() >= 8
    assert played.told == collections.Counter(range(600))
    assert played.runs == collections.Counter(range(600))


@pytest.mark.slow
def test_each_task_is_told_once_whoever_is_killed(tmp_path: Path):
    played = Played(
        tmp_path, ("broker", "name_server", "worker", "model"), total=600, pause_s=0.03, every_s=0.5
    )
    assert played.kills.total() >= 8
    assert played.told == collections.Counter(range(600))


@pytest.mark.slow
def test_workers_go_to_a_broker_that_has_come_back(tmp_path: Path):
    program = lp.Program("return")
    options = BrokerOptions(QUICK, str(tmp_path))
    parts = add_parts(program, workers=4, brokers=2, label="s", options=options)
    with lp.launch(program, "test_mp", restart={"s_broker": RESTART}) as running:
        brokers = [handle.dereference() for handle in parts.brokers.values()]

        def are_spread() -> bool:
            with contextlib.suppress(courier.ServerUnreachableError):
                return [broker.load().workers for broker in brokers] == [2, 2]
            return False

        poll_until(are_spread, 20)
        [pid] = [node.pid for node in running.status() if node.name == "s_broker[0]"]
        os.kill(pid or 0, signal.SIGKILL)
        poll_until(lambda: brokers[1].load().workers == 4, 20)
        poll_until(are_spread, 20)


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_chaos(tmp_path: Path):
    """A node is killed each second for ten minutes."""
    played = Played(
        tmp_path,
        ("broker", "name_server", "worker", "model"),
        total=30_000,
        pause_s=0.05,
        every_s=1.0,
        kills=10_000,
    )
    print(dict(played.kills), "runs:", played.runs.total())
    assert played.told == collections.Counter(range(30_000))
