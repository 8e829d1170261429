"""Engines on hosts, over real ssh: nodes are killed at random, and nothing is lost or doubled."""

import json

import pytest

from launchpad_lite.testing import poll_until
from tests.engines import needs_ssh_hosts
from tests.launchers.host_engines import SshDesk

pytestmark = [needs_ssh_hosts, pytest.mark.slow, pytest.mark.timeout(300)]

_KILLS = 6

_MAP_REDUCE = """
import operator
from launchpad_lite import engines

SHARED = pathlib.Path(HOW["shared"])


def count(mr, shared):
    words = [f"word{number % 89}" for number in range(20_000)]
    cached = mr.load(words, partitions=16).map(lambda word: (word, 1)).cache()
    jobs = []
    while not (shared / "finish").exists():
        jobs.append(sum(cached.reduce_by_key(operator.add).map(lambda pair: pair[1]).collect()))
        tell(shared, "jobs", jobs)


def make_program(_):
    program = lp.Program("engine")
    mr = engines.MapReduce.add_to(program, workers=4, memory_bytes=200_000)
    program.add_node(lp.PyNode(count, mr, SHARED), label="count")
    return program
"""


def test_each_item_counts_once_when_workers_of_map_reduce_are_killed_on_their_hosts(
    ssh: SshDesk,
) -> None:
    run = ssh.launch(_MAP_REDUCE, restart=100, placement=None)
    poll_until(lambda: run.told("jobs"), 60)
    killed = run.kill_at_random("map_reduce", kills=_KILLS)
    known = len(run.told("jobs"))
    poll_until(lambda: len(run.told("jobs")) > known + 1, 60)
    run.finish()
    jobs = json.loads((ssh.shared / "jobs").read_text())
    assert set(jobs) == {20_000}
    print(f"{len(killed)} kills, {len(jobs)} jobs")


_REPLICAS = """
import numpy
from launchpad_lite import replicas

SHARED = pathlib.Path(HOW["shared"])


def train(repl, shared, total):
    weights = numpy.zeros(200_000)
    repl.keep(weights=weights)

    def step_fn(number):
        time.sleep(0.02)
        weights[...] = 0.5 * weights + repl.all_reduce(numpy.full(200_000, number), "sum")

    def numbers(index, step):
        return (float(index + number) for number in range(step, total))

    for _ in repl.run(step_fn, numbers):
        if repl.replica_id == 0:
            (shared / "begun").touch()
    tell(shared, f"weights{repl.replica_id}", [repl.step, weights[0], weights.std()])


def make_program(_):
    program = lp.Program("replicas")
    replicas.MultiWorkerReplicator(3).add_to(program, train, SHARED, HOW["total"])
    return program
"""


def test_replicas_that_are_killed_on_their_hosts_train_as_if_nothing_had_happened(
    ssh: SshDesk,
) -> None:
    total = 600
    checkpoints = [str(ssh.there / "state"), 0.2]
    run = ssh.launch(
        _REPLICAS, restart=100, placement=None, checkpoints=checkpoints, how={"total": total}
    )
    poll_until((ssh.shared / "begun").exists, 60)
    killed = run.kill_at_random("replica", kills=_KILLS)
    run.check()
    expected = 0.0
    for number in range(total):
        expected = 0.5 * expected + sum(index + number for index in range(3))
    for index in range(3):
        steps, weight, spread = run.told(f"weights{index}")
        assert (steps, spread) == (total, 0.0)
        assert weight == pytest.approx(expected)
    print(f"{len(killed)} kills, {total} steps")
