"""Addresses of nodes that tests run by `node.run()`, without a program."""

from collections.abc import Sequence
from typing import Any

from courier import Secret
from launchpad.address import SimpleLocalAddressBuilder
from launchpad_lite import Node
from launchpad_lite.launching import AddressTable


def bind_addresses(nodes: Sequence[Node[Any]]) -> None:
    """Gives all addresses of nodes a free port, so that handles of the nodes can be dereferenced."""
    addresses = [address for node in nodes for address in node.addresses]
    places = {each.key: SimpleLocalAddressBuilder().build() for each in addresses}
    table = AddressTable(places, Secret.generate())
    for address in addresses:
        address.bind(table)
