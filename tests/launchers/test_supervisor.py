"""The supervisor on hosts that only write down what it tells them."""

from collections.abc import Mapping, Sequence

import launchpad_lite as lp
from courier import Secret
from launchers._supervisor import SupervisedProgram
from launchers.host.usage import Usage
from launchpad_lite._events import Constructed, Ended, HostLost
from launchpad_lite.launching import AddressTable, LaunchOptions
from launchpad_lite.testing import poll_until


class Store:
    """Only serves."""


def _calls(store: Store) -> None:
    raise AssertionError(store)


class RecordingHosts:
    """The store is on h1, its caller on h2."""

    name = "hosts"

    def __init__(self) -> None:
        self.told: list[str] = []
        self.program: SupervisedProgram | None = None

    def post(self, event: Constructed | Ended | HostLost) -> None:
        assert self.program is not None
        self.program.post(event)

    def host_of(self, node: str) -> str:
        return {"store[0]": "h1", "caller[0]": "h2"}[node]

    def start(self, node: str, attempt: int, cause: lp.NodeFailure | None) -> None:
        self.told.append(f"start {node}")
        self.post(Constructed(node, attempt, runs=node == "caller[0]"))

    def request_stop(self, node: str) -> None:
        self.told.append(f"stop {node}")

    def end_calls(self, node: str) -> None:
        self.told.append(f"end calls {node}")

    def tell_ended(self, callers: Sequence[str], keys: Sequence[str]) -> None:
        """Is of no interest."""

    def tell_lost(self, keys: Sequence[str]) -> None:
        self.told.append(f"lost {len(keys)}")
        if "stop caller[0]" in self.told:
            self.post(Ended("caller[0]", 0))

    def dump_stacks(self, node: str, *, hung: bool) -> None:
        """Is of no interest."""

    def terminate(self, node: str) -> None:
        self.post(Ended(node, 0))

    def kill(self, node: str) -> None:
        self.post(Ended(node, 0))

    def close(self) -> None:
        """Has nothing to give back."""

    def pids(self) -> Mapping[str, int]:
        return {}

    def usage(self) -> Mapping[str, Usage]:
        return {}

    def stacks(self) -> Mapping[str, str]:
        return {}


def _launch(**settings: object) -> RecordingHosts:
    program = lp.Program("calls")
    store = program.add_node(lp.CourierNode(Store), label="store")
    program.add_node(lp.PyNode(_calls, store), label="caller")
    plan = lp.plan(program, "test_mt", **settings)
    endpoints = {address.key: "10.0.0.1:1" for address in plan.addresses}
    hosts = RecordingHosts()
    hosts.program = SupervisedProgram(
        plan, LaunchOptions(20.0, None), AddressTable(endpoints, Secret.generate()), None
    )
    hosts.program.supervise(hosts)
    poll_until(lambda: len(hosts.told) == 2)
    del hosts.told[:]
    return hosts


def test_who_calls_a_lost_host_is_asked_to_end_before_its_calls_fail() -> None:
    hosts = _launch()
    program = hosts.program
    assert program is not None
    hosts.post(HostLost("h1", ("store[0]",), "h1 is lost"))
    assert program.join(60)
    assert hosts.told == ["stop caller[0]", "lost 1"]
    assert program.result is not None
    assert [each.node for each in program.result.failures] == ["store[0]"]


def test_calls_to_a_lost_host_fail_before_its_nodes_are_started_elsewhere() -> None:
    hosts = _launch(restart={"store": lp.RestartPolicy("on_failure", moves=True, backoff_s=0.0)})
    hosts.post(HostLost("h1", ("store[0]",), "h1 is lost"))
    poll_until(lambda: len(hosts.told) == 2)
    assert hosts.told == ["lost 1", "start store[0]"]
    assert hosts.program is not None
    hosts.program.kill()
    assert hosts.program.join(60)
