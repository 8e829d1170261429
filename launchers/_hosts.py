"""Hosts as users name them. Pure, but for reading the file that is named.

What a host turns out to have, and what runs on it, is said elsewhere.
"""

import dataclasses
import ipaddress
import itertools
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from launchers._toml import read_toml

#: What ssh gets goes through its command line, the user's configuration and sometimes a shell
#: (ProxyCommand, `Match exec`), so nothing that means something to one of them may be in it. What
#: begins with a dash would be an option of ssh.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
#: An @ too: in some domains accounts are named like addresses.
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+@-]*")
_ZONE = re.compile(r"[A-Za-z0-9_.-]+")
#: More is a slip of the finger, and would take all memory before anybody saw it.
_MOST_OF_A_RANGE = 10_000


@dataclass(frozen=True)
class HostSpec:
    """A host as a user names it. What is None is asked of the host.

    Attributes:
        name: How ssh knows it, without the user: a host name, an IP address, or an alias of
            `~/.ssh/config`. Unique within a launch; shown to people.
        user: Who logs in there; None leaves it to ssh.
        port: Of its sshd; None leaves it to ssh.
        python: Interpreter there, a command or a path.
        cpu: Number of cores that may be used.
        ram_gib: Main memory that may be used, in GiB.
        gpu: Number of accelerators that may be used.
        address: How other hosts reach it: a host name or an IP address.

    Raises:
        ValueError: A value cannot be; names all that cannot.
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
        # Bare, also if it is an IPv6 address: ssh takes brackets in its URIs only.
        return self.name if self.user is None else f"{self.user}@{self.name}"


#: Hosts as users write them down; see `parse_hosts`.
HostsChoice = str | os.PathLike[str] | Sequence[str | Mapping[str, Any] | HostSpec]

_OPTIONS = tuple(field.name for field in dataclasses.fields(HostSpec) if field.name != "name")
_ALIASES = {"ram": "ram_gib"}
_NUMBERS = {"port": int, "gpu": int, "cpu": float, "ram_gib": float}
_KNOWN = ", ".join("ram" if option == "ram_gib" else option for option in _OPTIONS)


def parse_hosts(given: HostsChoice) -> tuple[HostSpec, ...]:
    """Reads hosts as users write them down.

    A name may hold ranges as Slurm and pdsh write them: `h[1-4]`, `h[01-03,7]`. An IPv6 address
    stands in brackets, for its colons.

    Args:
        given: One of:

            - a string, `"h1,h2:gpu=2:cpu=8,user@h3:ram=16,[fd00::1]"`: hosts with their options;
            - the path of a TOML file, as a `Path` or as a string that ends in `.toml`: a table
              `[hosts.h1]` holds the options of a host, keys before all tables are those of all
              hosts that do not say otherwise;
            - a sequence of such strings, of mappings with a `name` and options, and of `HostSpec`.

            The options are the attributes of `HostSpec`; `ram` is short for `ram_gib`.

    Returns:
        The hosts, in the order in which they are named.

    Raises:
        ValueError: There are mistakes; all are listed.
    """
    reading = _Reading()
    if isinstance(given, os.PathLike) or (isinstance(given, str) and given.endswith(".toml")):
        reading.read_file(Path(given).expanduser())
    else:
        reading.read(given)
    return reading.hosts()


class _Reading:
    """Collects mistakes on the way, so that all are reported at once."""

    def __init__(self) -> None:
        self._found: list[HostSpec] = []
        self._mistakes: list[str] = []

    def hosts(self) -> tuple[HostSpec, ...]:
        by_name: dict[str, list[str]] = {}
        for host in self._found:  # names of hosts do not tell small from capital letters
            by_name.setdefault(host.name.lower(), []).append(host.name)
        self._mistakes += [
            f"host {names[0]!r} is named {len(names)} times; name it once, or if these are several "
            "(say, by port), give each a name of its own in ~/.ssh/config"
            for names in by_name.values()
            if len(names) > 1
        ]
        if not self._found and not self._mistakes:
            self._mistakes.append("there are none; name some, like hosts=['h1', 'h2:gpu=2']")
        mistakes = list(dict.fromkeys(self._mistakes))  # those of a range are the same for each
        if len(mistakes) == 1:
            raise ValueError(f"hosts: {mistakes[0]}")
        if mistakes:
            lines = "".join(f"\n  {i}. {text}" for i, text in enumerate(mistakes, start=1))
            raise ValueError(f"hosts have {len(mistakes)} mistakes:{lines}")
        return tuple(self._found)

    def read(self, given: Any) -> None:
        """Reads a string or a sequence. Users are not all checked by mypy."""
        if isinstance(given, str):
            self._read_text(given)
        elif isinstance(given, Sequence) and not isinstance(given, bytes | bytearray):
            for entry in given:
                self._read_entry(entry)
        else:
            self._mistakes.append(
                "expected a string like 'h1,h2:gpu=2', the path of a TOML file, or a list of "
                f"hosts, got {given!r}"
            )

    def read_file(self, path: Path) -> None:
        """Reads a TOML file: options of all hosts, and a table for each host."""
        try:
            content = read_toml(path)
        except ValueError as error:
            self._mistakes.append(str(error))
            return
        tables = content.pop("hosts", {})
        defaults = self._options(str(path), content)
        try:
            HostSpec("any", **defaults)
        except ValueError as error:
            self._mistakes.append(f"{path}, for all hosts: {error}")
            defaults = {}
        if not isinstance(tables, dict):
            self._mistakes.append(
                f"{path}: hosts is {tables!r}; write a table for each host, like [hosts.h1]"
            )
            return
        if not tables:
            self._mistakes.append(f"{path} names no hosts; write a table for each, like [hosts.h1]")
        for target, table in tables.items():
            where = f"{path}, host {target!r}"
            if isinstance(table, dict):
                self._add(where, target, self._options(where, table), defaults)
            else:
                self._mistakes.append(f"{where}: expected a table of options, got {table!r}")

    def _read_entry(self, entry: Any) -> None:
        if isinstance(entry, HostSpec):
            self._found.append(entry)
        elif isinstance(entry, str):
            self._read_text(entry)
        elif isinstance(entry, Mapping):
            options = dict(entry)
            target = options.pop("name", None)
            where = repr(entry)
            if isinstance(target, str):
                self._add(where, target, self._options(where, options))
            else:
                self._mistakes.append(f"{where}: expected a name, got {target!r}")
        else:
            self._mistakes.append(
                f"expected a string, a mapping or a HostSpec for each host, got {entry!r}"
            )

    def _read_text(self, text: str) -> None:
        if not text.strip():
            return
        for part in _split(",", text):
            target, *settings = _split(":", part.strip())
            where = repr(part.strip())
            options: dict[str, Any] = {}
            for setting in settings:
                name, equals, value = setting.partition("=")
                if not equals:
                    hint = f"; write port={name}" if name.isdecimal() else ""
                    self._mistakes.append(
                        f"{where}: {setting!r} is no option; options are written name=value{hint}"
                    )
                elif name in options:
                    self._mistakes.append(f"{where}: {name} is given twice")
                else:
                    options[name] = _number(_ALIASES.get(name, name), value)
            self._add(where, target, self._options(where, options))

    def _options(self, where: str, given: Mapping[str, Any]) -> dict[str, Any]:
        """Returns options by their full names; those that are not known are left out."""
        options: dict[str, Any] = {}
        for name, value in given.items():
            full_name = _ALIASES.get(name, name)
            if full_name not in _OPTIONS:
                self._mistakes.append(f"{where}: unknown option {name!r}; known are {_KNOWN}")
            elif full_name in options:
                self._mistakes.append(f"{where}: ram and ram_gib mean the same; give one of them")
            else:
                options[full_name] = value
        return options

    def _add(
        self,
        where: str,
        target: str,
        options: dict[str, Any],
        defaults: Mapping[str, Any] | None = None,
    ) -> None:
        """Adds the hosts that `user@name` stands for."""
        user, at, name = target.rpartition("@")
        if at:
            if options.setdefault("user", user) != user:
                self._mistakes.append(
                    f"{where}: the user is {user!r}, and {options['user']!r}; give one of them"
                )
        if options.get("address"):
            options["address"] = _without_brackets(options["address"])
        try:
            for each in _expanded(name):
                self._found.append(HostSpec(each, **{**(defaults or {}), **options}))
        except ValueError as error:
            self._mistakes.append(f"{where}: {error}")


def _mistakes_in(fields: Mapping[str, Any]) -> Iterator[str]:
    """Returns what cannot be of a host. Values are those of a user, whatever their types say."""
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
    for key in ("cpu", "ram_gib"):
        value = fields[key]
        if value is not None and not _is_amount(value, Real):
            yield f"{key} is a number, 0 or more, not {value!r}"
    if fields["gpu"] is not None and not _is_amount(fields["gpu"], Integral):
        yield f"gpu is a whole number, 0 or more, not {fields['gpu']!r}"
    port = fields["port"]
    if port is not None and not (_is_amount(port, Integral) and 1 <= port <= 65535):
        yield f"port is a whole number from 1 to 65535, not {port!r}"


def mistakes_in_words(**given: object) -> Iterator[str]:
    """Yields which options of a user, by name, are no commands or paths that a host can be given."""
    for name, value in given.items():
        if value is not None and not (
            isinstance(value, str) and value.isprintable() and value.strip(" ")[:1] not in ("", "-")
        ):
            yield f"{name} is a command or a path, which does not begin with a dash, not {value!r}"


def _is_amount(value: Any, kind: type) -> bool:
    is_number = isinstance(value, kind) and not isinstance(value, bool)
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
    # What Python takes for a zone may hold anything.
    return not percent or bool(_ZONE.fullmatch(zone))


def _split(separator: str, text: str) -> list[str]:
    """Splits at a character where it stands outside of brackets."""
    return re.split(rf"{separator}(?![^\[]*\])", text)


def _number(option: str, text: str) -> Any:
    """Reads the number that an option wants; what is none is left to the check."""
    try:
        return _NUMBERS[option](text)
    except (KeyError, ValueError):
        return text


def _without_brackets(address: Any) -> Any:
    bracketed = isinstance(address, str) and re.fullmatch(r"\[(.*:.*)\]", address)
    return bracketed[1] if bracketed else address


def _expanded(name: str) -> Iterable[str]:
    """Returns the names that a name with ranges stands for.

    Raises:
        ValueError: A range cannot be read, runs backwards, or is too long.
    """
    if (address := _without_brackets(name)) != name:
        return (str(address),)
    # Odd ones are what stood in brackets.
    parts = re.split(r"\[([^\[\]]*)\]", name)
    choices = [_numbers(part) if index % 2 else [part] for index, part in enumerate(parts)]
    if math.prod(map(len, choices)) > _MOST_OF_A_RANGE:
        raise ValueError(f"{name!r} stands for more than {_MOST_OF_A_RANGE} hosts")
    return map("".join, itertools.product(*choices))


def _numbers(text: str) -> list[str]:
    """Returns what the inside of brackets stands for; as wide as the first of each range."""
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
