"""Keys of datasets: which are equal, in whatever process, and where they go."""

import collections
import contextlib
import dataclasses
import datetime as dt
import decimal
import enum
import fractions
import itertools
import os
import pathlib
import pickle
import random
import subprocess
import sys
import uuid
import warnings
import zoneinfo
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, strategies as st

from launchpad_lite.engines._hashing import canonical, stable_hash


class Colour(enum.Enum):
    RED = 1
    BLUE = "blue"


class Number(enum.IntEnum):
    ONE = 1


class Word(str, enum.Enum):
    RED = "red"


class Text(str):
    __slots__ = ()


class Pair(NamedTuple):
    a: Any
    b: Any


@dataclasses.dataclass(frozen=True)
class Node:
    name: Any
    note: str = dataclasses.field(default="", compare=False)


@dataclasses.dataclass(frozen=True)
class Edge:
    name: Any


_NOON = dt.datetime(2020, 1, 2, 12, tzinfo=dt.timezone.utc)
_ID = "12345678123456781234567812345678"

#: Keys that are odd in some way: equal ones of different types, and different ones that look alike.
ODD: list[Any] = [
    *(1, 1.0, True, 1 + 0j, np.int64(1), np.float32(1), np.bool_(True), Number.ONE),
    *(decimal.Decimal("0.5"), fractions.Fraction(1, 2)),
    *(0, -0.0, False, None, "", b"", (), frozenset(), -1, 2**60, 2.0**60, 0.1, np.float64(0.1)),
    *("1", b"1", np.str_("1"), np.bytes_(b"1"), Text("1"), "é", "red", Word.RED, "\udc80"),
    *(
        float("nan"),
        np.float64("nan"),
        decimal.Decimal("nan"),
        np.datetime64("NaT", "s"),
        complex("nan"),
    ),
    *(Colour.RED, Colour.BLUE, "blue"),
    *(Node("a"), Node(Text("a"), "other"), Edge("a"), Node(1), Node(True), ("a",), Node(("a",))),
    *(Pair(1, 2), (1, 2), (1.0, 2), (2, 1), Pair(2, 1), ((1,), 2), (1, (2,))),
    *(frozenset([0, 8]), frozenset([8, 0])),
    *(frozenset([1, 2]), frozenset([2.0, 1]), frozenset([(1, 2)]), frozenset([Pair(1, 2)])),
    *(_NOON, _NOON.astimezone(zoneinfo.ZoneInfo("Asia/Tokyo")), _NOON.replace(tzinfo=None)),
    *(np.datetime64("2020-01-02T12", "h"), np.datetime64("2020-01-02T12:00", "us")),
    *(np.datetime64("2019-02", "M"), np.datetime64("2019-02-01", "s"), dt.date(2021, 1, 2)),
    *(dt.timedelta(hours=25), np.timedelta64(25, "h"), np.timedelta64(90000, "s")),
    *(np.timedelta64(1, "W"), np.timedelta64(7, "D"), uuid.UUID(_ID), uuid.UUID("{" + _ID + "}")),
    *(pathlib.Path("a/b"), pathlib.PurePosixPath("a//b"), "a/b"),
]


def _is_nan(key: Any) -> bool:
    return not isinstance(key, tuple | frozenset) and bool(key != key)


def are_equal(left: Any, right: Any) -> bool:
    """Returns what Python says, but that all that does not equal itself is one."""
    if _is_nan(left) or _is_nan(right):
        return _is_nan(left) and _is_nan(right)
    if isinstance(left, tuple) or isinstance(right, tuple):
        both = isinstance(left, tuple) and isinstance(right, tuple)
        return both and len(left) == len(right) and all(map(are_equal, left, right))
    kinds = type(left), type(right)
    if kinds == (Node, Node):  # whose `==` knows nothing of NaN
        return are_equal(left.name, right.name)
    if kinds.count(np.timedelta64) == 1 and dt.timedelta not in kinds:
        return False  # numpy takes a number for one of the same unit
    with warnings.catch_warnings(), contextlib.suppress(TypeError, OverflowError):
        # numpy, of what cannot be compared: a Decimal and np.int64, np.True_ and 2**63
        warnings.simplefilter("ignore")
        found = left == right
        return isinstance(found, bool | np.bool_) and bool(found)  # or an array of nothing
    return False


_NESTED = st.recursive(
    st.sampled_from(ODD) | st.floats() | st.text(max_size=2) | st.integers(),
    lambda inner: st.tuples(inner) | st.tuples(inner, inner) | st.builds(Node, inner),
    max_leaves=4,
)


def test_odd_keys_are_equal_exactly_if_their_forms_are() -> None:
    for left, right in itertools.product(ODD, ODD):
        assert (canonical(left) == canonical(right)) == are_equal(left, right), (left, right)


@given(_NESTED, _NESTED)
def test_equal_keys_have_the_same_form_and_hash(left: Any, right: Any) -> None:
    copy = pickle.loads(pickle.dumps(left))
    assert canonical(copy) == canonical(left)
    assert stable_hash(copy) == stable_hash(left)
    assert (canonical(left) == canonical(right)) == are_equal(left, right)
    if canonical(left) == canonical(right):
        assert stable_hash(left) == stable_hash(right)


def test_a_hash_is_the_same_in_every_process() -> None:
    code = (
        "from launchpad_lite.engines._hashing import stable_hash\n"
        "from tests.launchpad_lite.engines.test_hashing import ODD\n"
        "print(*map(stable_hash, ODD))"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True
    )
    assert [int(each) for each in done.stdout.split()] == [stable_hash(key) for key in ODD]


_RANDOM = random.Random(1)
_DAY = dt.datetime(2020, 1, 1, tzinfo=dt.timezone.utc)


@pytest.mark.parametrize(
    "key",
    [
        lambda _: _RANDOM.random(),
        lambda index: 3600 * index,
        lambda index: 3600.0 * index,
        lambda index: (3600 * index, _RANDOM.random()),
        lambda index: (index, index),
        lambda index: index / 1024,
        lambda index: index << 40,
        lambda index: f"key{index}",
        lambda index: ("a", str(index)),
        lambda index: _DAY + dt.timedelta(hours=index),
        lambda index: np.datetime64("2020-01-01") + np.timedelta64(index, "D"),
        lambda index: Node(8 * index),
        lambda index: frozenset([index, index + 8]),
    ],
)
def test_common_kinds_of_keys_are_spread_evenly(key: Callable[[int], Any]) -> None:
    hashes = [stable_hash(key(index)) for index in range(800)]
    for partitions in (7, 8):
        places = collections.Counter(each % partitions for each in hashes)
        assert max(places.values()) <= 2 * len(hashes) / partitions
        # So are those of one partition, over the rounds of what does not fit into memory.
        there = [each // partitions % 4 for each in hashes if each % partitions == 3]
        assert max(collections.Counter(there).values()) <= 2 * len(there) / 4


class Caseless(str):
    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return self.lower() == str(other).lower()

    def __hash__(self) -> int:
        return hash(self.lower())


@dataclasses.dataclass(frozen=True)
class Rounded:
    value: float

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Rounded) and round(self.value) == round(other.value)

    def __hash__(self) -> int:
        return hash(round(self.value))


class Plain:
    """Equals only itself, which no copy does."""


@pytest.mark.parametrize(
    "key",
    [
        Caseless("a"),
        Rounded(1.2),
        Plain(),
        ("a", Plain()),
        int,
        np.timedelta64(2, "M"),
        np.longdouble(1),
    ],
)
def test_keys_of_which_it_is_not_known_which_are_equal_are_refused_by_name(key: Any) -> None:
    kind = type(key[1] if isinstance(key, tuple) else key)
    with pytest.raises(TypeError, match=rf"\.{kind.__name__} cannot be the type of a key"):
        stable_hash(key)


def test_what_cannot_be_a_key_in_python_is_none_here() -> None:
    for key in ([1], (1, [2]), Node({})):
        with pytest.raises(TypeError, match="unhashable"):
            stable_hash(key)
