"""Engines on hosts, over real ssh: nodes are killed at random, and nothing is lost or doubled."""

import collections
import json
import re
import time

import pytest

from launchpad_lite.testing import poll_until
from tests.engines import needs_ssh_hosts
from tests.launchers.host_engines import CHECKOUT, SshDesk

pytestmark = [needs_ssh_hosts, pytest.mark.slow, pytest.mark.timeout(300)]

_KILLS = 6

_UPDATES = """
import random, uuid
from launchpad_lite import engines

SHARED = pathlib.Path(HOW["shared"])


class Logged:
    \"\"\"Values are tuples of updates, each of which is in a file before it is sent.\"\"\"

    barrier = engines.PSP(2, 1, 0.05)

    def __init__(self, shared):
        self.shared = shared

    def initial(self):
        return dict.fromkeys(range(6), ())

    def update(self, keys):
        time.sleep(0.01)
        update = uuid.uuid4().hex
        with (self.shared / f"{socket.gethostname()}-{os.getpid()}.log").open("a") as log:
            log.write(f"{update}\\n")
        return dict.fromkeys(keys, (update,))

    def stop(self):
        return (self.shared / "finish").exists()


def keep_values(values, shared):
    while not (shared / "finish").exists():
        time.sleep(0.05)
    time.sleep(2)  # the last steps end
    tell(shared, "values", {key: values.get(key).value for key in range(6)})
    lp.stop()
"""

_PARAMETER_SERVER = """
class Job(Logged, engines.ParameterServer):
    def push(self, worker, values):
        return self.update(values)


def make_program(_):
    program = lp.Program("engine")
    handle = Job(SHARED).add_to(program, workers=4, servers=2, progress_s=None)
    program.add_node(lp.PyNode(keep_values, handle, SHARED), label="keep")
    return program
"""

_PEER_TO_PEER = """
class Job(Logged, engines.PeerToPeer):
    def schedule(self):
        return random.sample(range(6), 2)

    def push(self, values):
        return self.update(values)

    def finish(self):
        lp.wait_for_stop()


def make_program(_):
    program = lp.Program("engine")
    handle = Job(SHARED).add_to(program, peers=5, replicas=3)
    program.add_node(lp.PyNode(keep_values, handle, SHARED), label="keep")
    return program
"""

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


@pytest.mark.parametrize(
    ("source", "group"),
    [
        (_PARAMETER_SERVER, "ps_worker"),
        (_PARAMETER_SERVER, "ps_server"),
        (_PEER_TO_PEER, "peer"),
    ],
    ids=["workers", "servers", "peers"],
)
def test_no_update_is_applied_twice_when_nodes_are_killed_on_their_hosts(
    ssh: SshDesk, source: str, group: str
) -> None:
    options = {"checkpoints": [str(ssh.there / "state"), 0.2]} if "ps_" in group else {}
    run = ssh.launch(_UPDATES, source, restart=100, placement=None, **options)
    poll_until(lambda: list(ssh.shared.glob("*.log")), 60)
    killed = run.kill_at_random(group, kills=_KILLS)
    time.sleep(1)
    run.finish()
    values = run.told("values").values()
    sent = [line for log in ssh.shared.glob("*.log") for line in log.read_text().split()]
    found = collections.Counter(update for updates in values for update in updates)
    assert set(found) <= set(sent)
    for updates in values:
        assert len(set(updates)) == len(updates)
    if group != "ps_server":  # with a server go the updates since its last checkpoint
        whole = sum(number == max(found.values()) for number in found.values())
        # Of each that was killed, and of each that was there at the end, one did not get through.
        assert len(sent) - whole <= len(killed) + 5
    print(f"{len(killed)} kills, {len(sent)} updates sent, {len(found)} found")


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
