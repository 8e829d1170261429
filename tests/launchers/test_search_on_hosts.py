"""Searches on hosts, over real ssh: nodes are killed at random, and brokers are cut off from each other."""

import collections
import contextlib
import random
import time

import pytest

from launchpad_lite.testing import poll_until
from tests.engines import needs_ssh_hosts
from tests.launchers.host_engines import Command, SshDesk

pytestmark = [needs_ssh_hosts, pytest.mark.slow, pytest.mark.timeout(300)]

_LEASE_S = 2.0
_SEARCH = """
from launchpad_lite import search

SHARED = pathlib.Path(HOW["shared"])
TIMING = search.Timing(lease_s=2.0, beat_s=0.4, silence_s=2.0, patience_s=2.0, poll_s=1.0)


def work(number):
    with (SHARED / "runs").open("a") as runs:
        runs.write(f"{number} {lp.current_node().name}\\n")
    time.sleep(HOW["task_s"])
    return number


class Numbers(search.Model):
    def __init__(self):
        self.asked = 0
        self.told = {}

    def ask(self):
        if self.asked == HOW["tasks"] or (SHARED / "finish").exists():
            return None
        self.asked += 1
        return search.Call(work, self.asked - 1)

    def tell(self, task, result):
        self.told[result] = self.told.get(result, 0) + 1
        self.is_new = True

    def done(self):
        if self.told and self.is_new:
            tell(SHARED, "told", [self.asked, self.told])
            self.is_new = False
        return False


def make_program(_):
    program = lp.Program("search")
    search.add_to(
        program,
        Numbers(),
        workers=HOW["workers"],
        brokers=2,
        folder=SHARED / "brokers",
        max_losses=1000,
        timing=TIMING,
    )
    return program
"""
_POLICY = {"when": "on_failure", "max_restarts": 1000, "max_backoff_s": 0.5}
_GROUPS = ("search_worker", "search_broker", "search_name_server", "search_model")


def _runs(ssh: SshDesk) -> list[list[str]]:
    """Returns the number and the worker of each run so far."""
    log = ssh.shared / "runs"
    return [line.split() for line in log.read_text().splitlines()] if log.exists() else []


def _check_told(run: Command) -> int:
    """Checks that the model was told each task once; returns how many there were."""
    asked, told = run.told("told")
    assert told == {str(number): 1 for number in range(asked)}
    return int(asked)


def _at_work(run: Command, group: str) -> list[str]:
    return [
        node
        for node, (state, _, _, pid, *_) in run.status().items()
        if node.startswith(group) and pid and state in ("running", "serving")
    ]


def test_each_task_is_told_once_when_nodes_are_killed_on_their_hosts(ssh: SshDesk) -> None:
    total = 600
    run = ssh.launch(
        _SEARCH,
        restart=dict.fromkeys(_GROUPS, _POLICY),
        placement=None,
        checkpoints=[str(ssh.there / "state"), 0.5],
        how={"tasks": total, "task_s": 0.05, "workers": 4},
    )
    poll_until(lambda: len(_runs(ssh)) > 20, 60)
    chance = random.Random(4)
    killed: collections.Counter[str] = collections.Counter()
    while run.process.poll() is None:
        group = chance.choice(_GROUPS)
        if killed.total() < 20 and (nodes := _at_work(run, group)):
            with contextlib.suppress(RuntimeError):  # it has ended meanwhile
                ssh.kill_worker(run, chance.choice(nodes))
                killed[group] += 1
        time.sleep(chance.uniform(0.2, 0.8))
    run.check()
    assert _check_told(run) == total
    assert killed.total() >= 8
    print(f"{dict(killed)} killed, {len(_runs(ssh))} runs of {total} tasks")


def test_brokers_that_cannot_reach_each_other_for_a_while_help_again_afterwards(
    ssh: SshDesk,
) -> None:
    brokers = {"search_broker[0]": "h2", "search_broker[1]": "h3"}
    others = dict.fromkeys(("search_name_server", "search_worker", "search_model"), "h1")
    run = ssh.launch(
        _SEARCH,
        placement={**brokers, **others},
        how={"tasks": 1_000_000, "task_s": 0.2, "workers": 4},
    )

    def workers_since(begun: int) -> "collections.Counter[str]":
        return collections.Counter(worker for _, worker in _runs(ssh)[begun:])

    # The model uses one broker, and half of the workers the other one.
    poll_until(lambda: len(workers_since(0)) == 4, 60)
    ssh.hosts.separate("h2", "h3")
    time.sleep(_LEASE_S)  # what the helper had is lost by now, or about to be
    begun = len(_runs(ssh))
    time.sleep(2 * _LEASE_S)
    assert 0 < len(workers_since(begun)) < 4  # those of the other broker have nothing to do
    for host in ("h2", "h3"):
        ssh.hosts.heal(host)
    healed_at = time.monotonic()
    begun = len(_runs(ssh))
    poll_until(lambda: len(workers_since(begun)) == 4, 60)
    print(f"all work again {time.monotonic() - healed_at:.1f} s after the network came back")
    run.finish()
    asked = _check_told(run)
    print(f"{len(_runs(ssh))} runs of {asked} tasks")
