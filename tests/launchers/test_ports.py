"""Ports are ours from the reservation to the end."""

import resource
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from courier.lowlevel import loopback
from launchers.host.link import LinkFrame
from launchers.host.ports import PortReservations, PortTakenError
from launchers.host.probe import WORD_BYTES
from launchers.supervision.agent_link import start_agent_here
from launchers.supervision.remote import AgentHost
from launchpad_lite.errors import LaunchError
from launchpad_lite.launching import Address
from launchpad_lite.testing import poll_until


def _listen(port: int, *, share: bool) -> socket.socket:
    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do
    if share:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        listening.bind((loopback(), port))
        listening.listen()
    except OSError:
        listening.close()
        raise
    return listening


def test_a_reserved_port_is_held_against_others_and_shared_with_ours() -> None:
    def is_given_back() -> bool:
        ports, others = PortReservations(), PortReservations()
        port = ports.reserve(None)
        with pytest.raises(OSError, match="in use"):
            _listen(port, share=False)
        with pytest.raises(PortTakenError):
            others.reserve(port)
        with _listen(port, share=True), socket.create_connection((loopback(), port), 20):
            pass  # the reservation takes no connections away
        ports.close()
        try:
            return others.reserve(port) == port
        except PortTakenError:  # somebody else was quicker
            return False
        finally:
            others.close()

    poll_until(is_given_back)


def test_connections_of_an_earlier_server_do_not_keep_its_port() -> None:
    with (
        socket.create_server((loopback(), 0)) as server,
        socket.create_connection(server.getsockname()),
    ):
        port = server.getsockname()[1]
        accepted, _ = server.accept()
        server.close()
        ports = PortReservations()
        with accepted:
            assert ports.reserve(port) == port
            with pytest.raises(OSError, match="in use"):
                _listen(port, share=False)
            _listen(port, share=True).close()
        ports.close()


def test_a_port_of_a_foreign_program_is_held_until_its_node_starts() -> None:
    ports = PortReservations()
    addresses = {node: Address(is_foreign=True) for node in ("one[0]", "two[0]")}
    for node, address in addresses.items():
        address.node = node
    found = ports.reserve_all(addresses.values())
    one, two = (found[address.key] for address in addresses.values())
    for port in (one, two):
        with pytest.raises(OSError, match="in use"):
            _listen(port, share=True)
    ports.lend("one[0]")
    _listen(one, share=False).close()
    with pytest.raises(OSError, match="in use"):
        _listen(two, share=False)
    ports.lend("one[0]")  # it starts again
    ports.close()


def test_the_system_gives_nobody_the_port_of_a_foreign_program_by_chance() -> None:
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = PortReservations()
    assert ports.reserve(None) >= first
    assert all(ports.reserve(None, lent_to="web[0]") < first for _ in range(20))
    ports.close()


def test_reserved_ports_are_all_different() -> None:
    ports = PortReservations()
    found = [ports.reserve(None) for _ in range(300)]
    assert len(set(found)) == 300
    ports.close()


@pytest.mark.parametrize("share", [True, False])
def test_a_taken_port_is_refused_and_only_what_was_held_before_is(share: bool) -> None:
    ports = PortReservations()
    of_a_node_that_runs = ports.reserve(None)
    with _listen(0, share=share) as taken:
        before = sorted(Path("/proc/self/fd").iterdir())
        port = taken.getsockname()[1]
        addresses = [Address(), Address(port=port)]
        for key, address in zip("ab", addresses, strict=True):
            address.key = key
        addresses[1].node = "learner[0]"
        words = rf"^learner\[0\]: .*{port} is taken.*; choose another port, or none"
        with pytest.raises(PortTakenError, match=words):
            ports.reserve_all(addresses)
        assert sorted(Path("/proc/self/fd").iterdir()) == before
    with pytest.raises(OSError, match="in use"):
        _listen(of_a_node_that_runs, share=False)
    ports.close()


def test_two_nodes_that_ask_for_the_same_port_are_named() -> None:
    ports = PortReservations()
    port = ports.reserve(None)
    ports.close()
    addresses = [Address(port=port), Address(port=port)]
    for key, address in zip("ab", addresses, strict=True):
        address.key, address.node = key, f"{key}[0]"
    with pytest.raises(PortTakenError, match=rf"^a\[0\] and b\[0\] ask for the same port, {port}"):
        ports.reserve_all(addresses)


@pytest.mark.skipif(sys.platform != "linux", reason="limits another process")
def test_an_agent_says_why_it_cannot_do_what_it_is_asked_and_lives() -> None:
    link = start_agent_here()
    assert isinstance(link.process, subprocess.Popen)
    host = AgentHost("h1", link, None)
    question = LinkFrame("survey", {"word": "00" * WORD_BYTES})
    try:
        host.ask_agent(LinkFrame("reserve", {"addresses": []}))
        (agent,) = psutil.Process(link.process.pid).children()
        resource.prlimit(agent.pid, resource.RLIMIT_NOFILE, (3, 1000))
        with pytest.raises(LaunchError, match="Too many open files"):
            host.ask_agent(question)
        resource.prlimit(agent.pid, resource.RLIMIT_NOFILE, (900, 1000))
        assert host.ask_agent(question).op == "surveyed"
    finally:
        host.close()
