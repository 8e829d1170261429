"""How hosts are written down, and what is wrong with those that cannot be."""

import sys
import types
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from launchers.hosts.host_list import HostSpec, parse_hosts


@pytest.mark.parametrize(
    ("given", "hosts"),
    [
        ("h1", [HostSpec("h1")]),
        (
            "h1,h2:gpu=2:cpu=8,user@h3:ram=16:python=/opt/py/bin/python3",
            [
                HostSpec("h1"),
                HostSpec("h2", gpu=2, cpu=8.0),
                HostSpec("h3", user="user", ram_gib=16.0, python="/opt/py/bin/python3"),
            ],
        ),
        ("h1, h2:port=2222", [HostSpec("h1"), HostSpec("h2", port=2222)]),
        ("h1:ram_gib=0.5:cpu=1.5", [HostSpec("h1", ram_gib=0.5, cpu=1.5)]),
        ("h1:user=me:address=10.0.0.7", [HostSpec("h1", user="me", address="10.0.0.7")]),
        ("me@corp.org@h1", [HostSpec("h1", user="me@corp.org")]),
        ("[::1]", [HostSpec("::1")]),
        ("user@[::1]:gpu=2,h2", [HostSpec("::1", user="user", gpu=2), HostSpec("h2")]),
        ("[fe80::1%eth0]", [HostSpec("fe80::1%eth0")]),
        ("h1:address=[fd00::1]", [HostSpec("h1", address="fd00::1")]),
        ("h[1-3]", [HostSpec("h1"), HostSpec("h2"), HostSpec("h3")]),
        ("h[01-02]", [HostSpec("h01"), HostSpec("h02")]),
        ("h[8-10]", [HostSpec("h8"), HostSpec("h9"), HostSpec("h10")]),
        (
            "me@h[1-2,7].lab:gpu=1,x",
            [
                HostSpec("h1.lab", user="me", gpu=1),
                HostSpec("h2.lab", user="me", gpu=1),
                HostSpec("h7.lab", user="me", gpu=1),
                HostSpec("x"),
            ],
        ),
        ("r[1-2]n[1,3]", [HostSpec("r1n1"), HostSpec("r1n3"), HostSpec("r2n1"), HostSpec("r2n3")]),
        (
            ["h1:gpu=1", {"name": "me@h2", "ram": 4}, {"name": "n[1-2]"}, HostSpec("h3", port=22)],
            [
                HostSpec("h1", gpu=1),
                HostSpec("h2", user="me", ram_gib=4),
                HostSpec("n1"),
                HostSpec("n2"),
                HostSpec("h3", port=22),
            ],
        ),
    ],
)
def test_hosts_are_written_as_a_string_or_a_list(given: Any, hosts: list[HostSpec]) -> None:
    assert parse_hosts(given) == tuple(hosts)


@pytest.mark.parametrize("as_path", [str, Path])
def test_a_file_holds_options_of_all_hosts_and_of_each(tmp_path: Path, as_path: Any) -> None:
    file = tmp_path / "hosts.toml"
    file.write_text(
        """
        user = "me"
        python = "/opt/py/bin/python3"
        ram = 8

        [hosts.h1]
        gpu = 2
        ram_gib = 16

        [hosts."you@n[1-2]"]
        cpu = 4

        [hosts]
        "fd00::1" = {}
        """
    )
    common = {"python": "/opt/py/bin/python3"}
    assert parse_hosts(as_path(file)) == (
        HostSpec("h1", "me", gpu=2, ram_gib=16, **common),  # type: ignore[arg-type]
        HostSpec("n1", "you", cpu=4, ram_gib=8, **common),  # type: ignore[arg-type]
        HostSpec("n2", "you", cpu=4, ram_gib=8, **common),  # type: ignore[arg-type]
        HostSpec("fd00::1", "me", ram_gib=8, **common),  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("hosts", "message"),
    [
        ("", "there are none; name some, like hosts=['h1', 'h2:gpu=2']"),
        ("h1,,h2", "'' cannot name a host"),
        ("h1:gpus=2", "'h1:gpus=2': unknown option 'gpus'; known are user, port, python, cpu, "),
        ("h1:2222", "'h1:2222': '2222' is no option; options are written name=value; write port="),
        ("h1:gpu", "'gpu' is no option; options are written name=value"),
        ("h1:gpu=1:gpu=2", "gpu is given twice"),
        ("h1:ram=1:ram_gib=2", "ram and ram_gib mean the same; give one of them"),
        ("h1:gpu=two", "'h1:gpu=two': gpu is a whole number, 0 or more, not 'two'"),
        ("h1:gpu=-1", "gpu is a whole number, 0 or more, not -1"),
        ("h1:ram=nan", "ram_gib is a number, 0 or more, not nan"),
        ("h1:port=0", "port is a whole number from 1 to 65535, not 0"),
        ("h1:port=65536", "port is a whole number from 1 to 65535, not 65536"),
        ("h1:python=", "python is a command or a path, which does not begin with a dash, not ''"),
        ("h1:python=-c", "which does not begin with a dash, not '-c'"),
        ("h1:python=a\nb", "which does not begin with a dash, not 'a\\nb'"),
        ("h1:address=-x", "address is a host name or an IP address, not '-x'"),
        ("h1,h2,h1:gpu=1", "host 'h1' is named 2 times; name it once, or if these are several"),
        ("h1,H1", "host 'h1' is named 2 times"),
        ("a@h1,b@h1", "host 'h1' is named 2 times"),
        ("h[1-3],h2", "host 'h2' is named 2 times"),
        ("h[3-1]", "[3-1] is no range: 1 is less than 3"),
        ("h[a-c]", "[a-c] is no range; write numbers like [1-4] or [01-03,7]"),
        ("h[]", "[] is no range"),
        ("h[1-999999999]", "[1-999999999] stands for more than 10000 hosts"),
        ("h[1-999][1-999]", "'h[1-999][1-999]' stands for more than 10000 hosts"),
        ("h[1-2", "'h[1-2' cannot name a host"),
        ("a@h1:user=b", "'a@h1:user=b': the user is 'a', and 'b'; give one of them"),
        ([{"gpu": 1}], "{'gpu': 1}: expected a name, got None"),
        ([{"name": "h1", "gpu": True}], "gpu is a whole number, 0 or more, not True"),
        ([7], "7: expected a string, a mapping or a HostSpec for each host"),
        (7, "expected a string like 'h1,h2:gpu=2', the path of a TOML file, or a list of hosts"),
    ],
)
def test_hosts_that_cannot_be_are_mistakes(hosts: Any, message: str) -> None:
    with pytest.raises(ValueError, match=r"^hosts: ") as caught:
        parse_hosts(hosts)
    assert message in str(caught.value)


def test_all_mistakes_are_told_at_once() -> None:
    with pytest.raises(ValueError, match=r"^hosts have 4 mistakes:") as caught:
        parse_hosts(["h1:gpu=x:cpu=y", "h[1-2]:color=red", "-h", {"name": "h2"}, "h2"])
    begins = [
        "  1. 'h1:gpu=x:cpu=y': cpu is a number, 0 or more, not 'y'; gpu is a whole number, ",
        "  2. 'h[1-2]:color=red': unknown option 'color'; known are ",
        "  3. '-h': '-h' cannot name a host: ",
        "  4. host 'h2' is named 2 times; name it once, ",
    ]
    lines = str(caught.value).splitlines()[1:]
    assert [line[: len(begin)] for line, begin in zip(lines, begins, strict=True)] == begins


@pytest.mark.parametrize(
    "name",
    [
        *(f"a{character}b" for character in " \t\n\0;&|>'\"\\/"),
        *["-oProxyCommand=touch${IFS}x", "$(x) `x`", "a*", "a?", "~a", "..", "%h", "::1%a;b"],
        "::1%",
        "h1\n",
        "\u202eh1",
    ],
)
def test_what_ssh_or_a_shell_would_understand_names_no_host_user_or_address(name: str) -> None:
    for fields in ({"name": name}, {"name": "h", "user": name}, {"name": "h", "address": name}):
        with pytest.raises(ValueError, match=r"cannot (name a host|be a user)|address is"):
            HostSpec(**fields)
        with pytest.raises(ValueError, match=r"^hosts"):
            parse_hosts([fields])


@given(st.text(min_size=1, max_size=12), st.text(max_size=8))
def test_no_text_becomes_an_option_of_ssh_or_more_than_one_word(name: str, user: str) -> None:
    try:
        hosts = parse_hosts([{"name": name, "user": user or None}])
    except ValueError:
        return
    for host in hosts:
        assert not host.destination.startswith("-")
        assert not set(host.destination) & set(" \t\n\0;&|<>$`\"'\\*?~(){}[]/#!")
        assert host.destination.isascii()
        assert host.destination.isprintable()


_NAMES = st.builds(str.__add__, st.sampled_from("hxz"), st.text("az09.-", max_size=8))


@given(
    st.lists(
        st.builds(
            HostSpec,
            _NAMES,
            user=st.none() | _NAMES,
            port=st.none() | st.integers(1, 65535),
            cpu=st.none() | st.floats(0, 1e6),
            ram_gib=st.none() | st.floats(0, 1e6),
            gpu=st.none() | st.integers(0, 99),
            address=st.none() | _NAMES,
        ),
        min_size=1,
        max_size=4,
        unique_by=lambda host: host.name,
    )
)
def test_hosts_written_as_a_string_are_read_as_they_were(hosts: list[HostSpec]) -> None:
    options = ("port", "cpu", "ram_gib", "gpu", "address")
    text = ",".join(
        f"{host.destination}"
        + "".join(
            f":{name}={value}" for name in options if (value := getattr(host, name)) is not None
        )
        for host in hosts
    )
    if not text.endswith(".toml"):
        assert parse_hosts(text) == tuple(hosts)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "names no hosts; write a table for each, like [hosts.h1]"),
        ("hosts = ['h1']", "names no hosts; write a table for each, like [hosts.h1]"),
        ("[hosts]\nh1 = 3", "host 'h1': expected a table of options, got 3"),
        ("color = 'red'\n[hosts.h1]", "unknown option 'color'; known are user, port,"),
        ("gpu = 'x'\n[hosts.h1]\n[hosts.h2]", "for all hosts: gpu is a whole number"),
        ("[hosts.h1]\nname = 'x'", "host 'h1': unknown option 'name'"),
        ("[hosts.h1]\ncpu = -1", "host 'h1': cpu is a number, 0 or more, not -1"),
        ("[hosts.h1", "hosts.toml is no TOML file: "),
    ],
)
def test_a_file_with_mistakes_is_named(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "hosts.toml"
    file.write_text(content)
    with pytest.raises(ValueError, match=r"^hosts: ") as caught:
        parse_hosts(str(file))
    assert message in str(caught.value)
    assert str(file) in str(caught.value)


def test_a_file_that_is_not_there_or_no_text_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere\.toml cannot be read: No such file"):
        parse_hosts(str(tmp_path / "nowhere.toml"))
    with pytest.raises(ValueError, match="cannot be read: Is a directory"):
        parse_hosts(tmp_path)
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"binary\.toml is no TOML file"):
        parse_hosts(tmp_path / "binary.toml")


def test_python_3_10_reads_files_with_tomli_and_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hosts.toml").write_text("[hosts.h1]")
    tomli = types.ModuleType("tomli")
    tomli.loads = lambda text: {"hosts": {"h2": {}}}  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tomllib", None)  # as if it were not there
    monkeypatch.setitem(sys.modules, "tomli", tomli)
    assert parse_hosts(tmp_path / "hosts.toml") == (HostSpec("h2"),)
    monkeypatch.setitem(sys.modules, "tomli", None)
    with pytest.raises(ValueError, match=r"pip install 'launchpad-lite\[ssh\]'"):
        parse_hosts(tmp_path / "hosts.toml")
