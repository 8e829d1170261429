"""Weights on hosts, over real ssh: each version leaves the host of its node once."""

import time
from pathlib import Path

import pytest

from launchpad_lite.testing import poll_until
from tests.beds.ssh_hosts import SshHosts
from tests.engines import needs_ssh_hosts
from tests.launchers.host_engines import SshDesk, desk_on

pytestmark = [needs_ssh_hosts, pytest.mark.slow, pytest.mark.timeout(300)]

_MIB = 8
_KILLS = 6
_HOSTS = ["h1", "h2", "h3", "h4"]
#: Two readers on each host but the first.
_PLACEMENT = {"trainer": "h1", "weights": "h1", "reader": ["h2", "h3", "h4", "h2", "h3", "h4"]}

_PROGRAM = f"""
import numpy
from launchpad_lite import rollouts

SHARED = pathlib.Path(HOW["shared"])


def publish(weights, shared):
    number = 0
    while not (shared / "finish").exists():
        number += 1
        values = numpy.full({_MIB} << 17, float(number))
        tell(shared, "published", [number, weights.publish(values)])
        while True:
            time.sleep(0.01)
            try:
                read = [json.loads((shared / f"reader{{i}}").read_text()) for i in range(6)]
            except FileNotFoundError:
                continue
            if all(each == number for each in read) or (shared / "finish").exists():
                break
    lp.stop()


def read(weights, shared):
    for values, version in weights.versions():
        assert values.min() == values.max(), "torn"
        tell(shared, f"reader{{lp.current_node().replica}}", int(values[0]))


def make_program(_):
    program = lp.Program("weights")
    weights = rollouts.Weights().add_to(program)
    program.add_node(lp.PyNode(publish, weights, SHARED), label="trainer")
    with program.group("reader"):
        for _ in range(6):
            program.add_node(lp.PyNode(read, weights, SHARED))
    return program
"""


def sent_bytes(hosts: SshHosts, name: str) -> int:
    """What a host has sent to others, ever."""
    lines = hosts.run_on(name, "cat", "/proc/net/dev").splitlines()[2:]
    counts = {line.split(":")[0].strip(): int(line.split(":")[1].split()[8]) for line in lines}
    return sum(count for name, count in counts.items() if name != "lo")


def test_weights_leave_their_host_once_and_pass_on_past_readers_that_are_killed(
    tmp_path: Path,
) -> None:
    with SshHosts(4) as bed, desk_on(bed, lambda: SshDesk(bed, tmp_path)) as ssh:
        run = ssh.launch(_PROGRAM, restart=100, hosts=_HOSTS, placement=_PLACEMENT)

        def published() -> int:
            return (run.told("published") or [0])[0]

        poll_until(lambda: published() > 2, 60)
        first, before = published(), sent_bytes(bed, "h1")
        poll_until(lambda: published() >= first + 20, 60)
        sent = sent_bytes(bed, "h1") - before
        versions = published() - first
        print(f"{sent / 2**20 / _MIB / versions:.2f} times for each of {versions} versions")
        assert sent < 1.3 * _MIB * 2**20 * (versions + 1)
        killed = run.kill_at_random("reader", kills=_KILLS)
        known = published()
        began_at = time.monotonic()
        poll_until(lambda: published() >= known + 20, 60)
        print(f"{len(killed)} kills, then 20 versions in {time.monotonic() - began_at:.1f} s")
        run.finish()
