"""Each engine of real hosts holds to the contract; what is particular to one is elsewhere."""

from typing import Any

import pytest

from launchpad_lite.testing import poll_until
from tests.engines import needs_kubernetes, needs_slurm, needs_ssh_hosts
from tests.launchers.host_contract import DetachingContract, HostEngineContract
from tests.launchers.host_engines import Command, Desk, KubernetesDesk, SlurmDesk

# A launch alone takes half a minute on a machine that is busy.
pytestmark = pytest.mark.timeout(300)


@needs_ssh_hosts
@pytest.mark.usefixtures("ssh_hosts")
class TestSsh(HostEngineContract):
    engine = "ssh"
    refused = (
        {"hosts": "h1,nowhere", "placement": None},
        r"^nowhere: ssh ended with exit code 255: .*Could not resolve hostname nowhere",
    )


@needs_slurm
@pytest.mark.usefixtures("slurm_cluster")
class TestSlurm(DetachingContract):
    engine = "slurm"
    refused = ({"nodes": 4}, "nodes=4, but there are only 3")

    def reference(self, script: Command) -> str:
        return script.job

    def recover(self, desk: Desk, host: str) -> None:
        assert isinstance(desk, SlurmDesk)
        poll_until(lambda: not desk.processes(), 30)
        desk.cluster.boot(host)  # Slurm waits for it until it takes the job for over

    @pytest.mark.bed
    def test_a_killed_launcher_leaves_nothing(self, desk: Desk) -> None:
        """Here the job outlives it, as the documentation says, and can be found again."""
        run = desk.begin()
        run.kill()
        assert desk.leftovers()
        stop = desk.command_line("stop", run.job).check()
        assert "counting: stopped, `stop` in another shell" in stop
        desk.assert_nothing_is_left()


@needs_kubernetes
@pytest.mark.usefixtures("kubernetes_cluster")
class TestKubernetes(DetachingContract):
    engine = "kubernetes"
    refused = (
        {"image": "localhost/bare:1"},
        r"No module named '\w+' in the image of the supervisor",
    )

    def reference(self, script: Command) -> str:
        return "counting"

    @pytest.mark.bed
    def test_a_killed_launcher_leaves_nothing(self, desk: Desk) -> None:
        assert isinstance(desk, KubernetesDesk)
        options: dict[str, Any] = {"launcher_silence_s": 8, "ttl_s": 8}
        run = desk.begin(how={"timing": {"beat_s": 0.5}}, **options)
        supervisor = desk.pod("supervisor")
        run.kill()
        phases = ("Succeeded", "Failed")
        poll_until(lambda: all(pod["status"]["phase"] in phases for pod in desk.cluster.pods()), 60)
        words = "no message came from the launching process for 8 s"
        assert words in desk.cluster.log(supervisor)
        desk.assert_nothing_is_left()
