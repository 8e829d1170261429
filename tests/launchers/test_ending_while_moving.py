"""A program that is asked to end while a node moves does not wait for the host it moves to."""

import threading
from pathlib import Path

import psutil

import launchpad_lite as lp
from courier import Secret
from launchers.hosts.fleet import Fleet
from launchers.supervision.agent_link import start_agent_here
from launchers.supervision.remote import AgentHost
from launchers.supervision.supervised_program import SupervisedProgram
from launchpad_lite.errors import LaunchError
from launchpad_lite.launching import AddressTable, LaunchOptions

_PATIENCE_S = 8.0  # less than an agent has for an answer


class Starter:
    """Moves nodes to a host that does not answer."""

    def __init__(self, lost: AgentHost, target: AgentHost) -> None:
        self.hosts, self.placement = [lost, target], {"node[0]": lost.name}
        self._target = target
        self.asks = threading.Event()
        self.has_given_up = threading.Event()

    def move(self, node: str, fleet: Fleet) -> None:
        self.asks.set()
        try:
            self._target.reserve([])
        finally:
            self.has_given_up.set()
        raise LaunchError("it answered after all")

    def close(self) -> None:
        pass


def test_a_stop_is_not_held_up_by_an_agent_that_does_not_answer() -> None:
    program = lp.Program("p")
    program.add_node(lp.PyNode(print), label="node")
    plan = lp.plan(program, "test_mp")
    options, table = LaunchOptions(5.0, None), AddressTable({}, Secret.generate())
    supervised = SupervisedProgram(plan, options, table, None)
    links = [start_agent_here() for _ in range(2)]
    lost, mute = (AgentHost(n, link, None) for n, link in zip(("lost", "mute"), links, strict=True))
    agents = []
    try:
        mute.reserve([])
        starter = Starter(lost, mute)
        for host in (lost, mute):
            host.listen(supervised, Path(), None, None)
        lost.is_lost = True
        agents = psutil.Process(links[1].process.pid).children()
        for agent in agents:
            agent.suspend()
        supervised.supervise(Fleet(starter))
        assert starter.asks.wait(_PATIENCE_S)
        supervised.request_stop("the test wants it")
        assert starter.has_given_up.wait(_PATIENCE_S)
    finally:
        for agent in agents:
            agent.resume()
        supervised.kill()
        assert supervised.join(30)
    assert supervised.result is not None
    assert supervised.result.outcome is lp.Outcome.STOPPED
    assert not supervised.result.failures
