"""Hosts as users write them. Pure, except that it reads the file that a user names."""

import contextlib
import dataclasses
import ipaddress
import itertools
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from launchers.hosts.toml import read_toml

#: A name passes through the command line of ssh, the user's configuration and sometimes a shell
#: (ProxyCommand, `Match exec`), so it must hold no character that one of them interprets. With a dash at
#: the beginning it would be an option of ssh.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
#: With @, because some domains name accounts like mail addresses.
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+@-]*")
_ZONE = re.compile(r"[A-Za-z0-9_.-]+")
#: A longer range is a typing mistake, and would fill the memory before the user noticed.
_MOST_OF_A_RANGE = 10_000


@dataclass(frozen=True)
class HostSpec:
    """A host as a user names it. The launcher asks the host for values that are None.

    Attributes:
        name: Its name for ssh, without the user: a host name, an IP address, or an alias of
            `~/.ssh/config`. Unique within a launch; shown to people.
        user: Who logs in there; None leaves it to ssh.
        port: Of its sshd; None leaves it to ssh.
        python: Interpreter there, a command or a path.
        cpu: Number of cores that may be used.
        ram_gib: Main memory that may be used, in GiB.
        gpu: Number of accelerators that may be used.
        address: How other hosts reach it: a host name or an IP address.

    Raises:
        ValueError: A value is invalid; lists all invalid values.
    """

    name: str
    user: str | None = None
    port: int | None = None
    python: str | None = None
    cpu: float | None = None
    ram_gib: float | None = None
    gpu: int | None = None
    address: str | None = None

    def __post_init__(self) -> None:
        if mistakes := list(_mistakes_in(dataclasses.asdict(self))):
            raise ValueError("; ".join(mistakes))

    @property
    def destination(self) -> str:
        """What ssh is called with: `user@h3` or `h3`."""
        # An IPv6 address has no brackets: ssh takes these in its URIs only.
        return self.name if self.user is None else f"{self.user}@{self.name}"


#: Hosts as users write them down; see `parse_hosts`.
HostsChoice = str | os.PathLike[str] | Sequence[str | Mapping[str, Any] | HostSpec]

_OPTIONS = tuple(field.name for field in dataclasses.fields(HostSpec) if field.name != "name")
_NUMBERS: dict[str, Callable[[str], Any]] = dict.fromkeys(("cpu", "ram", "ram_gib"), float)
_NUMBERS |= {"port": int, "gpu": int}
_KNOWN = ", ".join(_OPTIONS).replace("ram_gib", "ram")


def parse_hosts(given: HostsChoice) -> tuple[HostSpec, ...]:
    """Reads hosts as users write them down (`docs/hosts.md`), and returns them in that order.

    A name may hold ranges as Slurm and pdsh write them: `h[1-4]`, `h[01-03,7]`. An IPv6 address
    stands in brackets, because of its colons. `given` is a string of hosts with their options, like
    `"h1:gpu=2:cpu=8,user@h3:ram=16,[fd00::1]"`; the path of a TOML file, with a table for each host
    and defaults before all tables; or a sequence of strings, mappings with a `name`, and
    `HostSpec`s.
    """
    found: list[HostSpec] = []
    mistakes: list[str] = []
    try:
        is_file = isinstance(given, str) and given.endswith(".toml")
        if is_file or isinstance(given, os.PathLike):
            entries = list(_entries_of_file(Path(given).expanduser()))  # type: ignore[arg-type]
        else:
            entries = list(_entries(given))
    except ValueError as error:
        mistakes, entries = [str(error)], []
    for where, entry, defaults in entries:
        try:
            found += _read(entry, defaults)
        except ValueError as error:
            mistakes.append(f"{where}: {error}")
    counts = Counter(host.name.lower() for host in found)  # names of hosts are case-insensitive
    mistakes += [
        f"host {name!r} is named {count} times; name it once, or if these are several "
        "(say, by port), give each a name of its own in ~/.ssh/config"
        for name, count in counts.items()
        if count > 1
    ]
    if not found and not mistakes:
        mistakes = ["there are none; name some, like hosts=['h1', 'h2:gpu=2']"]
    if len(mistakes) == 1:
        raise ValueError(f"hosts: {mistakes[0]}")
    if mistakes:
        lines = "".join(f"\n  {i}. {text}" for i, text in enumerate(mistakes, start=1))
        raise ValueError(f"hosts have {len(mistakes)} mistakes:{lines}")
    return tuple(found)


#: Where an entry stands, for messages; the entry; and the defaults for it.
_Entry = tuple[str, Any, Mapping[str, Any]]


def _entries(given: Any) -> Iterator[_Entry]:
    """Yields the hosts in a string or a sequence. Checks types, because not all users run mypy."""
    if isinstance(given, str):
        given = [given]
    elif not isinstance(given, Sequence) or isinstance(given, bytes | bytearray):
        raise ValueError(
            "expected a string like 'h1,h2:gpu=2', the path of a TOML file, or a list of hosts, got "
            f"{given!r}"
        )
    for each in given:
        if isinstance(each, str) and each.strip():
            yield from ((repr(part.strip()), part.strip(), {}) for part in _split(",", each))
        elif not isinstance(each, str):
            yield repr(each), each, {}


def _entries_of_file(path: Path) -> Iterator[_Entry]:
    """Yields the hosts in a TOML file: a table for each, keys before all tables for all of them."""
    content = read_toml(path)
    tables = content.pop("hosts", {})
    try:
        defaults = _options(content)
        HostSpec("any", **defaults)
    except ValueError as error:
        raise ValueError(f"{path}, for all hosts: {error}") from None
    if not isinstance(tables, dict) or not tables:
        raise ValueError(f"{path} names no hosts; write a table for each, like [hosts.h1]")
    for target, table in tables.items():
        where = f"{path}, host {target!r}"
        if not isinstance(table, dict):
            raise ValueError(f"{where}: expected a table of options, got {table!r}")
        if "name" in table:
            raise ValueError(f"{where}: unknown option 'name'; it is the name of the table")
        yield where, {**table, "name": target}, defaults


def _read(entry: Any, defaults: Mapping[str, Any]) -> Iterator[HostSpec]:
    if isinstance(entry, HostSpec):
        yield entry
        return
    if isinstance(entry, str):
        entry = _settings(entry)
    elif not isinstance(entry, Mapping):
        raise ValueError("expected a string, a mapping or a HostSpec for each host")
    target = entry.get("name")
    if not isinstance(target, str):
        raise ValueError(f"expected a name, got {target!r}")
    options = {**defaults, **_options({k: v for k, v in entry.items() if k != "name"})}
    user, at, name = target.rpartition("@")
    if at and entry.get("user", user) != user:
        raise ValueError(f"the user is {user!r}, and {entry['user']!r}; give one of them")
    if at:
        options["user"] = user
    options["address"] = _without_brackets(options.get("address"))
    for each in _expanded(name):
        yield HostSpec(each, **options)


def _settings(text: str) -> dict[str, Any]:
    target, *settings = _split(":", text)
    found: dict[str, Any] = {"name": target}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals:
            hint = f"; write port={name}" if name.isdecimal() else ""
            raise ValueError(f"{setting!r} is no option; options are written name=value{hint}")
        if name in found:
            raise ValueError(f"{name} is given twice")
        # `HostSpec` rejects a value that is no number.
        with contextlib.suppress(KeyError, ValueError):
            value = _NUMBERS[name](value)
        found[name] = value
    return found


def _options(given: Mapping[str, Any]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for name, value in given.items():
        full_name = "ram_gib" if name == "ram" else name
        if full_name not in _OPTIONS:
            raise ValueError(f"unknown option {name!r}; known are {_KNOWN}")
        if full_name in options:
            raise ValueError("ram and ram_gib mean the same; give one of them")
        options[full_name] = value
    return options


def _mistakes_in(fields: Mapping[str, Any]) -> Iterator[str]:
    """Yields what is invalid in a host. Its values come from a user, so their types may be wrong."""
    name, user, python, address = (fields[key] for key in ("name", "user", "python", "address"))
    if not _names_host(name):
        yield (
            f"{name!r} cannot name a host: it begins with a letter or digit and holds nothing but "
            "these and . _ - (or it is an IP address)"
        )
    if user is not None and not (isinstance(user, str) and _USER.fullmatch(user)):
        yield (
            f"{user!r} cannot be a user: it begins with a letter or digit and holds nothing but "
            "these and . _ - + @"
        )
    yield from mistakes_in_words(python=python)
    if address is not None and not _names_host(address):
        yield f"address is a host name or an IP address, not {address!r}"
    for key, kind in (("cpu", "number"), ("ram_gib", "number"), ("gpu", "whole number")):
        if not _is_amount(fields[key], whole=kind == "whole number"):
            yield f"{key} is a {kind}, 0 or more, not {fields[key]!r}"
    port = fields["port"]
    if port is not None and not (_is_amount(port, whole=True) and 1 <= port <= 65535):
        yield f"port is a whole number from 1 to 65535, not {port!r}"


def mistakes_in_words(**given: object) -> Iterator[str]:
    """Yields a mistake for each option of a user that is neither a command nor a path."""
    for name, value in given.items():
        if value is not None and not (
            isinstance(value, str) and value.isprintable() and value.strip(" ")[:1] not in ("", "-")
        ):
            yield f"{name} is a command or a path, which does not begin with a dash, not {value!r}"


def _is_amount(value: Any, *, whole: bool) -> bool:
    if value is None:
        return True
    is_number = isinstance(value, Integral if whole else Real) and not isinstance(value, bool)
    return is_number and math.isfinite(value) and value >= 0


def _names_host(name: Any) -> bool:
    if not isinstance(name, str):
        return False
    if _NAME.fullmatch(name):
        return True
    address, percent, zone = name.partition("%")
    try:
        ipaddress.IPv6Address(address)
    except ValueError:
        return False
    # Python accepts any text as a zone.
    return not percent or bool(_ZONE.fullmatch(zone))


def _split(separator: str, text: str) -> list[str]:
    """Splits at a character where it stands outside of brackets."""
    return re.split(rf"{separator}(?![^\[]*\])", text)


def _without_brackets(address: Any) -> Any:
    bracketed = isinstance(address, str) and re.fullmatch(r"\[(.*:.*)\]", address)
    return bracketed[1] if bracketed else address


def _expanded(name: str) -> Iterable[str]:
    """Returns the names that a name with ranges stands for."""
    if (address := _without_brackets(name)) != name:
        return (str(address),)
    # Parts with odd numbers stood in brackets.
    parts = re.split(r"\[([^\[\]]*)\]", name)
    choices = [_numbers(part) if index % 2 else [part] for index, part in enumerate(parts)]
    if math.prod(map(len, choices)) > _MOST_OF_A_RANGE:
        raise ValueError(f"{name!r} stands for more than {_MOST_OF_A_RANGE} hosts")
    return map("".join, itertools.product(*choices))


def _numbers(text: str) -> list[str]:
    """Returns the numbers that the text in brackets stands for, padded to the width of the first of each range."""
    numbers: list[str] = []
    for part in text.split(","):
        ends = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", part)
        if ends is None:
            raise ValueError(f"[{text}] is no range; write numbers like [1-4] or [01-03,7]")
        first, last = ends[1], ends[2] or ends[1]
        if int(last) < int(first):
            raise ValueError(f"[{text}] is no range: {last} is less than {first}")
        if int(last) - int(first) >= _MOST_OF_A_RANGE:
            raise ValueError(f"[{text}] stands for more than {_MOST_OF_A_RANGE} hosts")
        numbers += [f"{number:0{len(first)}}" for number in range(int(first), int(last) + 1)]
    return numbers
