"""What a node is told, and what it tells; the nodes that are parts of it are told as well."""

import contextlib
import threading
from collections.abc import Iterator

import pytest

import courier
import launchpad_lite as lp
from launchpad_lite.life.events import (
    RequestStop,
    Said,
    ServersEnded,
    ServersLost,
    ServersMoved,
    StopReceived,
    Tell,
)
from launchpad_lite.worker.address import AddressTable
from launchpad_lite.worker.runtime import NodeRuntime, NodeSetup

_KEY = "learner"


class Learner:
    def __init__(self) -> None:
        self.release = threading.Event()

    def step(self) -> int:
        return 1

    def wait(self) -> None:
        self.release.wait(30)


class Family:
    """A node, one that is a part of it, and one that is a part of that one."""

    def __init__(self, endpoint: str, secret: courier.Secret) -> None:
        self.secret = secret
        self.table = AddressTable({_KEY: endpoint}, secret)
        self.host, self.part, self.part_of_part = (
            NodeRuntime(NodeSetup("p", label, 0), self.table, lambda _: None)
            for label in ("host", "part", "part_of_part")
        )

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        with self.host.hosting([self.part]), self.part.hosting([self.part_of_part]):
            yield

    def client(self, of: NodeRuntime, endpoint: str | None = None) -> courier.Client:
        """Returns what a handle gives that is dereferenced in one of them."""
        address = endpoint or self.table.endpoints[_KEY]
        client = courier.Client(address, secret=self.secret, call_timeout_s=20)
        of.clients.keep(client)
        return client


@pytest.fixture
def learner() -> Iterator[courier.Server]:
    learner = Learner()
    server = courier.Server(learner, secret=courier.Secret.generate(), in_process="wire")
    server.start()
    yield server
    learner.release.set()
    server.stop(0.0)


@pytest.fixture
def family(learner: courier.Server) -> Iterator[Family]:
    assert learner.secret is not None
    family = Family("127.0.0.1:9", learner.secret)
    yield family
    for each in (family.host, family.part, family.part_of_part):
        each.clients.close("over")


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_parts_do_not_call_where_nobody_answers_any_more(family: Family, before: bool) -> None:
    if before:
        family.host.obey(ServersEnded("host[0]", (_KEY,)))
    with family.gathered():
        if not before:
            family.host.obey(ServersEnded("host[0]", (_KEY,)))
        for each in (family.part, family.part_of_part):
            with pytest.raises(courier.ServerUnreachableError):
                family.client(each).step()


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_parts_follow_a_server_that_has_moved(
    family: Family, learner: courier.Server, before: bool
) -> None:
    old = family.table.endpoints[_KEY]
    if before:
        family.host.obey(ServersMoved({_KEY: learner.address}))
    with family.gathered():
        clients = [family.client(each, old) for each in (family.part, family.part_of_part)]
        if not before:
            family.host.obey(ServersMoved({_KEY: learner.address}))
        assert [client.step() for client in clients] == [1, 1]


def test_parts_give_up_calls_to_a_lost_host(family: Family, learner: courier.Server) -> None:
    family.table.endpoints[_KEY] = learner.address
    with family.gathered():
        client = family.client(family.part_of_part)
        assert client.step() == 1
        future = client.futures.wait()
        family.host.obey(ServersLost((_KEY,)))
        with pytest.raises(courier.ServerLostError):
            future.result(20)


def test_parts_that_begin_when_calls_were_ended_make_none(
    family: Family, learner: courier.Server
) -> None:
    family.table.endpoints[_KEY] = learner.address
    family.host.obey(RequestStop("host[0]"))
    family.host.obey(Tell("host[0]", "end_calls"))
    with family.gathered():
        for each in (family.part, family.part_of_part):
            assert each.stop_event.is_set()
            with pytest.raises(courier.CallCancelledError, match="asked to stop"):
                family.client(each).step()


def test_a_node_that_was_asked_while_it_was_constructed_tells_again_whether_it_listens() -> None:
    said: list[Said] = []
    setup = NodeSetup("program", "node", 0, notice_s=1.0)
    runtime = NodeRuntime(setup, AddressTable({}, courier.Secret.generate()), said.append)
    with runtime.active():
        runtime.obey(RequestStop("node[0]"))
        assert said[-1] == StopReceived("node[0]", 0, listens=True)  # it may yet look
        runtime.constructed(runs=True)
        assert said[-1] == StopReceived("node[0]", 0, listens=False)
        assert lp.stop_event().is_set()
        assert said[-1] == StopReceived("node[0]", 0, listens=True)


def test_the_health_of_a_node_that_reports_its_object_twice_is_checked_by_one_thread() -> None:
    setup = NodeSetup("program", "node", 0, liveness=lp.Liveness(health_s=60))
    runtime = NodeRuntime(setup, AddressTable({}, courier.Secret.generate()), lambda _: None)
    with runtime.active():
        runtime.constructed(runs=True)
        with runtime.at_work(runs=True):
            names = [each.name for each in threading.enumerate()]
            assert names.count("launchpad-health") == 1
