"""Searches on hosts and in pods: nodes are killed at random, and brokers are cut off from each other."""

import collections
import shutil
import sys
import time

import pytest

from launchpad_lite.testing import poll_until
from tests.engines import needs_kubernetes, needs_slurm, needs_ssh_hosts
from tests.launchers.host_engines import CHECKOUT, Command, Desk, SlurmDesk, SshDesk

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

_LEASE_S = 2.0
_SEARCH = """
from launchpad_lite import search

SHARED = pathlib.Path(HOW["shared"])
TIMING = search.Timing(lease_s=2.0, beat_s=0.4, silence_s=2.0, patience_s=2.0, poll_s=1.0)


def work(number):
    with (SHARED / "runs").open("a") as runs:
        runs.write(f"{number} {os.environ.get('GUEST') or lp.current_node().name}\\n")
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
_RUN = """
if __name__ == "__main__":
    result = search.run(
        Numbers(),
        workers=HOW["workers"],
        brokers=2,
        launcher=LAUNCHER,
        folder=SHARED / "brokers",
        timing=TIMING,
        resources={"search_worker": {"cpu": 1, "ram": 0.2}},
        **OPTIONS,
    )
    tell(SHARED, "told", [result.model.asked, result.model.told])
"""
_POLICY = {"when": "on_failure", "max_restarts": 1000, "max_backoff_s": 0.5}
_GROUPS = ("search_worker", "search_broker", "search_name_server", "search_model")


def _runs(desk: Desk) -> list[list[str]]:
    """Returns the number and the worker of each run so far."""
    log = desk.shared / "runs"
    return [line.split() for line in log.read_text().splitlines()] if log.exists() else []


def _check_told(run: Command) -> int:
    """Checks that the model was told each task once; returns how many there were."""
    asked, told = run.told("told")
    assert told == {str(number): 1 for number in range(asked)}
    return int(asked)


@pytest.mark.parametrize(
    ("engine", "kills"),
    [
        pytest.param("ssh", 16, marks=needs_ssh_hosts, id="ssh"),
        pytest.param("slurm", 16, marks=needs_slurm, id="slurm"),
        # A pod takes seconds to come back.
        pytest.param("kubernetes", 10, marks=needs_kubernetes, id="kubernetes"),
    ],
)
def test_each_task_is_told_once_when_nodes_are_killed_where_they_run(
    request: pytest.FixtureRequest, engine: str, kills: int
) -> None:
    desk: Desk = request.getfixturevalue(engine)
    run = desk.launch(
        _SEARCH,
        restart=dict.fromkeys(_GROUPS, _POLICY),
        placement=None,
        checkpoints=[str(desk.there / "state"), 0.5],
        how={"tasks": 1_000_000, "task_s": 0.05, "workers": 4},
    )
    poll_until(lambda: len(_runs(desk)) > 20, 90)
    killed = run.kill_at_random(*_GROUPS, kills=kills, seed=4)
    run.finish()
    groups = collections.Counter(node.partition("[")[0] for node in killed)
    print(f"{dict(groups)} killed, {len(_runs(desk))} runs of {_check_told(run)} tasks")


def _requeue(slurm: SlurmDesk, *jobs: str) -> None:
    """Has Slurm end jobs as when it pre-empts them, and start them again at once."""
    slurm.slurm("scontrol", "requeue", ",".join(jobs))
    for job in jobs:
        state = ("squeue", "-h", "-j", job, "-o", "%T")
        poll_until(lambda state=state: "PENDING" in slurm.slurm(*state), 60)
        poll_until(lambda job=job: not any(f"[{job}." in each for each in slurm.hosts.leftovers()))
        # In the second of its end Slurm would take the new run for the old one.
        slurm.slurm("scontrol", "update", f"JobId={job}", "StartTime=now+2")


@needs_slurm
def test_a_search_and_workers_in_jobs_of_their_own_go_on_when_slurm_preempts_them(
    slurm: SlurmDesk,
) -> None:
    run = slurm.launch(
        _SEARCH,
        _RUN,
        placement=None,
        nodes=2,
        requeue=True,
        how={"tasks": 1_000_000, "task_s": 0.05, "workers": 1},
    )
    poll_until(lambda: _runs(slurm), 60)
    for package in ("courier", "launchers", "launchpad_lite"):  # of this checkout hosts see nothing
        shutil.copytree(CHECKOUT / package, slurm.folder / package)
    command = f"{sys.executable} -m launchpad_lite.search worker {slurm.there}/brokers/join.json"
    submit = ("sbatch", "--parsable", "--requeue", f"--wrap={command}")
    guests = ("guest0", "guest1")
    jobs = [slurm.slurm(*submit, f"--export=ALL,GUEST={guest}").strip() for guest in guests]

    def await_runs(*workers: str) -> None:
        begun = len(_runs(slurm))
        poll_until(lambda: {worker for _, worker in _runs(slurm)[begun:]} >= set(workers), 60)

    await_runs(*guests)
    _requeue(slurm, *jobs)
    await_runs(*guests)
    _requeue(slurm, run.job)
    await_runs("search_worker[0]")
    _requeue(slurm, *jobs)  # they know the first start of the search only
    await_runs("search_worker[0]", *guests)
    run.finish()
    print(f"{len(_runs(slurm))} runs of {_check_told(run)} tasks")


@needs_ssh_hosts
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
