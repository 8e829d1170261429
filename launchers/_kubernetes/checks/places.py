"""Places in an object, and how rules are applied to them."""

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeGuard

#: What a rule says about a value: what is wrong and what to do; None: nothing. Values of another
#: type than the rule is about are the structure's matter. Empty texts are absent, as in Go.
Rule = Callable[[object], str | None]

#: Rules, each for all places that a pattern means: see `Place.select`.
Rules = Sequence[tuple[str, Rule]]

#: Fields, between commas, that must be in all places that a pattern means; no pattern: right here.
Needs = Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Place:
    """A value in an object, and where. What is absent, or of another type, reads as empty.

    Attributes:
        value: The value; None: absent, which is what null means to an API server.
        path: Where it stands.
        found: Mistakes of the whole object; grows.
    """

    value: object
    path: str
    found: list[str]

    def __getitem__(self, name: str) -> "Place":
        value = self.value.get(name) if is_map(self.value) else None
        step = f".{name}" if name.isidentifier() else f"[{shown(name)}]"
        return Place(value, (self.path + step).removeprefix("."), self.found)

    @property
    def given(self) -> bool:
        return self.value is not None

    @property
    def text(self) -> str:
        return self.value if isinstance(self.value, str) else ""

    @property
    def number(self) -> int | None:
        return self.value if is_int(self.value) else None

    @property
    def elements(self) -> list["Place"]:
        """What a list holds; by name, where its elements have one."""
        if not is_list(self.value):
            return []
        return [
            Place(each, f"{self.path}[{_name_of(each) or index}]", self.found)
            for index, each in enumerate(self.value)
        ]

    @property
    def entries(self) -> list[tuple[str, "Place"]]:
        """What a mapping holds, with its keys."""
        if not is_map(self.value):
            return []
        return [(key, self[key]) for key in self.value if isinstance(key, str)]

    def select(self, pattern: str) -> Iterator["Place"]:
        """Yields the places with a value that a pattern means.

        Args:
            pattern: Names of fields between dots. `{a,b}`: each of them; `*`: every value of a
                mapping; `[]` after a name: every element of the list.
        """
        places = [self]
        for names, is_of_list in _steps(pattern):
            below: list[Place] = []
            for place in places:
                value = place.value
                if not is_map(value):
                    continue
                if names == ("*",):
                    below += [each for _, each in place.entries]
                else:
                    # Most patterns mean nothing in most objects: what is absent costs little.
                    below += [place[name] for name in names if value.get(name) is not None]
            places = [each for list_ in below for each in list_.elements] if is_of_list else below
        yield from (place for place in places if place.given)

    def wrong(self, what: str) -> None:
        self.found.append(f"{self.path}: {what}" if self.path else what)

    def obey(self, rule: Rule) -> None:
        if self.given and (complaint := rule(self.value)):
            self.wrong(complaint)

    def keys_obey(self, rule: Rule) -> None:
        for key, each in self.entries:
            if complaint := rule(key):
                each.wrong(complaint)


@cache
def _steps(pattern: str) -> list[tuple[tuple[str, ...], bool]]:
    """The steps of a pattern: the names of fields, and whether elements of their lists are meant."""
    return [
        (tuple(step.removesuffix("[]").strip("{}").split(",")), step.endswith("[]"))
        for step in pattern.split(".")
    ]


def _name_of(value: object) -> str:
    name = value.get("name") if is_map(value) else None
    return name if isinstance(name, str) and re.fullmatch(r"[\w.-]{1,63}", name) else ""


# What rules about several places have in common.


def apply(place: Place, rules: Rules) -> None:
    for pattern, rule in rules:
        for each in place.select(pattern):
            each.obey(rule)


def need(place: Place, needs: Needs) -> None:
    """Reports fields that are missing, or empty texts or lists."""
    for pattern, names in needs:
        for each in place.select(pattern) if pattern else [place]:
            for name in names.split(","):
                if each[name].value in (None, "") or (
                    is_list(each[name].value) and not each[name].value
                ):
                    each[name].wrong("missing; give it")


def unique(places: Iterable[Place], advice: str) -> None:
    """Reports places that hold what an earlier one holds."""
    seen = set()
    for place in places:
        # Some values, like lists, have no hash.
        if (key := repr(place.value)) in seen and place.given:
            place.wrong(f"{shown(place.value)} is used twice; {advice}")
        seen.add(key)


def exactly_one(place: Place, names: Sequence[str], role: str) -> None:
    """Reports a place in which none or several of these fields are given."""
    given = [name for name in names if place[name].given]
    if not given:
        place.wrong(f"{role} is missing; give one of {', '.join(names)}")
    elif len(given) > 1:
        place.wrong(f"{' and '.join(given)} are given; a {role} is only one of them")


# Types as JSON has them.


def is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def is_map(value: object) -> TypeGuard[Mapping[object, Any]]:
    # Most are dicts, of which Python knows sooner.
    return isinstance(value, dict) or isinstance(value, Mapping)  # noqa: SIM101 - in this order


def is_list(value: object) -> TypeGuard[Sequence[object]]:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)


# Values in messages.


def shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:70]}... ({len(text)} characters)"


def meant(word: str, known: Sequence[str]) -> str:
    """What to use instead of a word that is not among those known."""
    near = difflib.get_close_matches(word[:100], known, 1, 0.6)
    if near:
        return f"did you mean {near[0]!r}?"
    if len(known) < 3:
        return f"use {' or '.join(map(repr, known))}"
    return f"known are {', '.join(known)}"
