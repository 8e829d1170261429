"""Engines on hosts, over real ssh: nodes are killed at random, and nothing is lost or doubled."""

import re

import pytest

from launchpad_lite.testing import poll_until
from tests.engines import needs_ssh_hosts
from tests.launchers.host_engines import CHECKOUT, SshDesk

pytestmark = [needs_ssh_hosts, pytest.mark.slow, pytest.mark.timeout(300)]

_KILLS = 6


def test_the_example_with_peers_runs_on_hosts(ssh: SshDesk) -> None:
    program = str(CHECKOUT / "examples" / "peers" / "program.py")
    run = ssh.command_line("--hosts=h1,h2,h3", program, "--peers=6", "--steps=20")
    assert re.search(r"120 steps of \d peers", run.check())


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
