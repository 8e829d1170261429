"""Commands and services outside of the program, as they are described; nothing runs."""

import pickle
import re
from pathlib import Path
from typing import Any

import pytest

import launchpad_lite as lp
from launchpad_lite.launching import Address


class Server:
    def ping(self) -> int:
        return 1


def test_the_host_of_an_endpoint_is_without_the_brackets_of_ipv6() -> None:
    endpoint = lp.Endpoint("[fd00::1]:80")
    assert (endpoint.host, endpoint.port) == ("fd00::1", 80)


WRONG: list[tuple[list[Any], dict[str, Any], type[Exception], str]] = [
    ([[], "", "  \n", [""], ()], {}, ValueError, "takes a program"),
    ([None, 5, b"ls", Path("/bin/ls"), {"ls"}, ["ls", 5], [b"ls"]], {}, TypeError, "text"),
    ([["ls", "{http}"]], {}, ValueError, "names of addresses are: none"),
    ([["ls"]], {"listens": "http"}, TypeError, re.escape("listens=['http']")),
    *(
        ([["ls"]], {"listens": [name]}, ValueError, "lower-case")
        for name in ("", "HTTP", "a b", "a-b", "a.b", "1a", "ä")
    ),
    ([["ls"]], {"listens": ["http", "http"]}, ValueError, "not all different"),
    ([["ls", "\ud800"]], {}, ValueError, "codec can't encode"),
    ([["ls", "a\0"]], {}, ValueError, "holds a zero byte"),
    ([["ls"]], {"env": {"A=B": "1"}}, ValueError, "env cannot have the name 'A=B'"),
    (
        [["ls"]],
        {"listens": ["http"], "uses": {"http": lp.CourierNode(Server).create_handle()}},
        ValueError,
        "both",
    ),
    *(
        ([["ls"]], {"uses": {"db": thing}}, TypeError, r"uses\['db'\] is a handle")
        for thing in (5, None, "127.0.0.1:5", lp.CommandNode(["ls"]), lp.Deferred(Server))
    ),
    *(([["ls"]], {"ready": ready}, ValueError, "no regular expression") for ready in ("(", "[a")),
    *(
        ([["ls"]], {"ready_timeout_s": seconds}, ValueError, "ready_timeout_s")
        for seconds in (0, -1, float("nan"))
    ),
]


@pytest.mark.parametrize(("commands", "options", "error", "words"), WRONG)
def test_wrong_commands_are_refused(
    commands: list[Any], options: dict[str, Any], error: type[Exception], words: str
) -> None:
    for command in commands:
        with pytest.raises(error, match=words):
            lp.CommandNode(command, **options)


def test_paths_are_arguments(tmp_path: Path) -> None:
    node = lp.CommandNode([Path("/bin/ls"), tmp_path])
    assert node.description == "CommandNode(ls)"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{nobody}", "{nobody} is unknown; names of addresses are: http"),
        ("{}", "{} is unknown"),
        ("{http.name}", "{http.name} is unknown"),
        ("{http.host.port}", "is unknown"),
        ("{http[0]}", "is unknown"),
        ("{http!r}", "{http!r} is unknown"),
        ("{http.port:>{width}}", "{http.port:>{width}} is unknown"),
        ("{http", "a brace itself is written twice"),
        ("http}", "a brace itself is written twice"),
        ("awk '{print $1}'", "A brace itself is written twice"),
    ],
)
def test_a_wrong_placeholder_is_refused(text: str, words: str) -> None:
    places: list[tuple[Any, Any]] = [
        (["ls", text], None),
        (f"ls {text}", None),
        ("ls", {"A": text}),
    ]
    for command, env in places:
        with pytest.raises(ValueError, match=re.escape(words)):
            lp.CommandNode(command, listens=["http"], env=env)


def test_doubled_braces_are_fine() -> None:
    lp.CommandNode(["awk", "{{print $1}}", "{{{http.port}}}"], listens=["http"])


def test_an_endpoint_is_text_with_parts() -> None:
    endpoint = lp.Endpoint("127.0.0.1:4711")
    assert endpoint == "127.0.0.1:4711"
    assert (endpoint.host, endpoint.port) == ("127.0.0.1", 4711)
    again = pickle.loads(pickle.dumps(endpoint))
    assert isinstance(again, lp.Endpoint)
    assert again.port == 4711


def test_a_handle_of_a_program_that_does_not_run_gives_nothing() -> None:
    with pytest.raises(lp.UnresolvedAddressError):
        lp.CommandNode(["ls"], listens=["http"]).create_handle().dereference()
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
    plan = lp.plan(program, "test_mt")
    web_plan, _, client = plan.executables
    assert {"http", "admin"} <= {address.name for address in web_plan.addresses}
    assert client.calls == ("web[0]", "server[0]")
    assert "CommandNode(web)" in str(plan)
    assert "CommandNode(client)  calls web[0], server[0]" in str(plan)


def test_wrong_services_are_refused() -> None:
    for address in ("", "host", "host:", ":5", "host:0", "host:70000", "host:x"):
        with pytest.raises(ValueError, match=r"host:port|port|address"):
            lp.ExternalNode(address)
    with pytest.raises(TypeError, match="function that takes the address"):
        lp.ExternalNode("db:1", client=5)  # type: ignore[arg-type]


def test_a_service_is_found_without_a_running_program() -> None:
    node = lp.ExternalNode("db:1", client=lp.Endpoint)
    assert node.create_handle().dereference() == "db:1"
    assert node.description == "ExternalNode(db:1)"


def test_copies_of_an_address_know_for_whom_it_is() -> None:
    for is_foreign in (True, False):
        address = Address("http", is_foreign=is_foreign)
        assert pickle.loads(pickle.dumps(address)).is_foreign is is_foreign
