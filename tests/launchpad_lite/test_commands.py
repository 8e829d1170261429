"""Commands and services outside of the program, as they are described; nothing runs."""

import pickle
import re
import socket
from pathlib import Path
from typing import Any

import pytest

import launchpad_lite as lp
from launchers._ports import LOOPBACK, PortReservations
from launchpad_lite.launching import Address


class Server:
    def ping(self) -> int:
        return 1


def _work_of(program: lp.Program, index: int = 0) -> Any:
    return lp.plan(program, "test_mt").executables[index]


@pytest.mark.parametrize("command", [[], "", "  \n", [""], ()])
def test_a_command_without_a_program_is_refused(command: Any) -> None:
    with pytest.raises(ValueError, match="takes a program"):
        lp.CommandNode(command)


@pytest.mark.parametrize("command", [None, 5, b"ls", Path("/bin/ls"), {"ls"}, ["ls", 5], [b"ls"]])
def test_a_command_that_is_no_text_is_refused(command: Any) -> None:
    with pytest.raises(TypeError, match="text"):
        lp.CommandNode(command)


def test_paths_are_arguments(tmp_path: Path) -> None:
    node = lp.CommandNode([Path("/bin/ls"), tmp_path])
    assert node.description == "CommandNode(ls)"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{nobody}", "{nobody} is unknown; names of addresses are: http"),
        ("{}", "{} is unknown"),
        ("{0}", "{0} is unknown"),
        ("{http.name}", "{http.name} is unknown"),
        ("{http.}", "is unknown"),
        ("{http.host.port}", "is unknown"),
        ("{http[0]}", "is unknown"),
        ("{http!r}", "{http!r} is unknown"),
        ("{http.port:>{width}}", "{http.port:>{width}} is unknown"),
        ("{HTTP}", "is unknown"),
        ("{http", "a brace itself is written twice"),
        ("http}", "a brace itself is written twice"),
        ("awk '{print $1}'", "A brace itself is written twice"),
    ],
)
@pytest.mark.parametrize("where", ["argument", "shell", "environment"])
def test_a_wrong_placeholder_is_refused(where: str, text: str, words: str) -> None:
    command: Any = {"argument": ["ls", text], "shell": f"ls {text}"}.get(where, ["ls"])
    env = {"A": text} if where == "environment" else None
    with pytest.raises(ValueError, match=re.escape(words)):
        lp.CommandNode(command, listens=["http"], env=env)


def test_without_addresses_there_are_no_placeholders() -> None:
    with pytest.raises(ValueError, match="names of addresses are: none"):
        lp.CommandNode(["ls", "{http}"])


def test_doubled_braces_are_fine() -> None:
    lp.CommandNode(["awk", "{{print $1}}", "{{{http.port}}}"], listens=["http"])


def test_names_of_addresses_are_a_list() -> None:
    with pytest.raises(TypeError, match=re.escape("listens=['http']")):
        lp.CommandNode(["ls"], listens="http")


@pytest.mark.parametrize("name", ["", "HTTP", "a b", "a-b", "a.b", "1a", "ä"])
def test_a_wrong_name_of_an_address_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="lower-case"):
        lp.CommandNode(["ls"], listens=[name])


def test_names_of_addresses_differ() -> None:
    with pytest.raises(ValueError, match="not all different"):
        lp.CommandNode(["ls"], listens=["http", "http"])
    handle = lp.CommandNode(["ls"], listens=["http"]).create_handle()
    with pytest.raises(ValueError, match="both"):
        lp.CommandNode(["ls"], listens=["http"], uses={"http": handle})


@pytest.mark.parametrize(
    "thing", [5, None, "127.0.0.1:5", lp.CommandNode(["ls"]), lp.Deferred(Server)]
)
def test_only_handles_are_used(thing: Any) -> None:
    with pytest.raises(TypeError, match=r"uses\['db'\] is a handle"):
        lp.CommandNode(["ls"], uses={"db": thing})


@pytest.mark.parametrize("ready", ["(", "*", "[a"])
def test_a_wrong_regular_expression_is_refused(ready: str) -> None:
    with pytest.raises(ValueError, match="no regular expression"):
        lp.CommandNode(["ls"], ready=ready)


@pytest.mark.parametrize("seconds", [0, -1, float("nan")])
def test_a_wrong_time_to_get_ready_is_refused(seconds: float) -> None:
    with pytest.raises(ValueError, match="ready_timeout_s"):
        lp.CommandNode(["ls"], ready_timeout_s=seconds)


def test_an_endpoint_is_text_with_parts() -> None:
    endpoint = lp.Endpoint("127.0.0.1:4711")
    assert endpoint == "127.0.0.1:4711"
    assert (endpoint.host, endpoint.port) == ("127.0.0.1", 4711)
    again = pickle.loads(pickle.dumps(endpoint))
    assert isinstance(again, lp.Endpoint)
    assert again.port == 4711


def test_a_handle_of_a_program_that_does_not_run_gives_nothing() -> None:
    program = lp.Program("idle")
    handle = program.add_node(lp.CommandNode(["ls"], listens=["http"]), label="web")
    with pytest.raises(lp.UnresolvedAddressError):
        handle.dereference()


def test_a_handle_of_a_command_that_listens_nowhere_says_so() -> None:
    with pytest.raises(TypeError, match="listens nowhere"):
        lp.CommandNode(["ls"]).create_handle().dereference()


def test_commands_and_whom_they_use_are_in_the_plan() -> None:
    program = lp.Program("plan")
    web = program.add_node(lp.CommandNode(["/bin/web"], listens=["http", "admin"]), label="web")
    server = program.add_node(lp.CourierNode(Server), label="server")
    database: Any = lp.ExternalNode("db.example.org:6379")
    outside = program.add_node(database, label="db")
    uses = {"web": web, "server": server, "db": outside}
    program.add_node(lp.CommandNode("client -x {web} {db}", uses=uses), label="client")
    program.add_node(lp.CourierNode(Server), label="idle")
    plan = lp.plan(program, "test_mt")
    assert [each.name for each in plan.executables] == [
        "web[0]",
        "server[0]",
        "client[0]",
        "idle[0]",
    ]
    web_plan, _, client, _ = plan.executables
    assert {"http", "admin"} <= {address.name for address in web_plan.addresses}
    assert client.calls == ("web[0]", "server[0]")
    assert "CommandNode(web)" in str(plan)
    assert "CommandNode(client)  calls web[0], server[0]" in str(plan)


@pytest.mark.parametrize("launcher", ["test_mt", "test_mp"])
def test_a_cycle_of_commands_is_in_the_plan(launcher: str) -> None:
    program = lp.Program("cycle")
    there = program.declare("b")
    a = program.add_node(lp.CommandNode(["a", "{b}"], listens=["a"], uses={"b": there}), label="a")
    program.add_node(lp.CommandNode(["b", "{a}"], listens=["b"], uses={"a": a}), label="b")
    plan = lp.plan(program, launcher)
    assert [each.calls for each in plan.executables] == [("b[0]",), ("a[0]",)]


def test_a_used_node_that_was_never_added_is_a_mistake() -> None:
    program = lp.Program("lost")
    lost = lp.CommandNode(["ls"], listens=["http"]).create_handle()
    program.add_node(lp.CommandNode(["ls"], uses={"web": lost}), label="a")
    program.add_node(lp.CommandNode(["ls"], uses={"c": program.declare("c")}), label="b")
    with pytest.raises(lp.ProgramError) as wrong:
        lp.plan(program)
    first, second = wrong.value.mistakes
    assert "a[0] CommandNode(ls): uses['web'] is a handle to a node that was never added" in first
    assert "b[0] CommandNode(ls): uses['c'] is a handle to c[0], which was declared" in second


def test_a_node_that_serves_nothing_cannot_be_used() -> None:
    program = lp.Program("silent")
    silent = program.add_node(lp.PyNode(print), label="silent")
    program.add_node(lp.CommandNode(["ls"], uses={"silent": silent}), label="a")
    with pytest.raises(lp.ProgramError, match="serves nothing"):
        lp.plan(program)


@pytest.mark.parametrize("address", ["", "host", "host:", ":5", "host:0", "host:70000", "host:x"])
def test_a_wrong_address_of_a_service_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match=r"host:port|port|address"):
        lp.ExternalNode(address)


def test_the_client_of_a_service_is_made_by_a_function() -> None:
    with pytest.raises(TypeError, match="function that takes the address"):
        lp.ExternalNode("db:1", client=5)  # type: ignore[arg-type]


def test_a_service_is_found_without_a_running_program() -> None:
    node = lp.ExternalNode("db:1", client=lp.Endpoint)
    assert node.create_handle().dereference() == "db:1"
    assert node.description == "ExternalNode(db:1)"


# Ports


def _listen(port: int) -> socket.socket:
    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((LOOPBACK, port))
        listening.listen()
    except OSError:
        listening.close()
        raise
    return listening


def test_a_port_that_is_held_for_others_can_be_listened_at_and_again() -> None:
    ports = PortReservations()
    port = ports.reserve(None, is_foreign=True)
    for _ in range(2):
        with (
            _listen(port) as listening,
            socket.create_connection((LOOPBACK, port), 5),
        ):
            listening.accept()[0].close()
    ports.close()


def test_ports_of_both_kinds_are_all_different() -> None:
    ports, others = PortReservations(), PortReservations()
    found = [
        each.reserve(None, is_foreign=index % 3 > 0)
        for index in range(300)
        for each in (ports, others)
    ]
    assert len(set(found)) == 600
    ports.close()
    others.close()


def test_a_port_of_ours_cannot_be_listened_at_by_others() -> None:
    ports = PortReservations()
    port = ports.reserve(None)
    with pytest.raises(OSError, match="in use"):
        _listen(port)
    ports.close()


def test_copies_of_an_address_know_for_whom_it_is() -> None:
    for is_foreign in (True, False):
        address = Address("http", is_foreign=is_foreign)
        assert pickle.loads(pickle.dumps(address)).is_foreign is is_foreign
