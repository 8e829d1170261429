"""Ports are ours from the reservation to the end."""

import socket
from pathlib import Path

import pytest

from launchers._ports import LOOPBACK, PortReservations, PortTakenError
from launchpad_lite.launching import Address
from launchpad_lite.testing import poll_until


def _listen(port: int, *, share: bool) -> socket.socket:
    listening = socket.socket()
    if share:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        listening.bind((LOOPBACK, port))
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
        with _listen(port, share=True), socket.create_connection((LOOPBACK, port), 20):
            pass  # the reservation takes no connections away
        ports.close()
        try:
            return others.reserve(port) == port
        except PortTakenError:  # somebody else was quicker
            return False
        finally:
            others.close()

    poll_until(is_given_back)


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
def test_a_taken_port_is_refused_and_nothing_is_held(share: bool) -> None:
    ports = PortReservations()
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


def test_two_nodes_that_ask_for_the_same_port_are_named() -> None:
    ports = PortReservations()
    port = ports.reserve(None)
    ports.close()
    addresses = [Address(port=port), Address(port=port)]
    for key, address in zip("ab", addresses, strict=True):
        address.key, address.node = key, f"{key}[0]"
    with pytest.raises(PortTakenError, match=rf"^a\[0\] and b\[0\] ask for the same port, {port}"):
        ports.reserve_all(addresses)
