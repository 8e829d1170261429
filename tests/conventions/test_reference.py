"""The reference, which is made of docstrings, shows how each public name is used."""

import ast
import enum
import inspect
import re
import textwrap
from typing import Any

import pytest

import courier
import launchpad_lite as lp
from courier import lowlevel
from launchpad_lite import engines, replicas, rollouts, search, testing

_ROOMS = {
    "lp": lp,
    "courier": courier,
    "lowlevel": lowlevel,
    "testing": testing,
    "engines": engines,
    "search": search,
    "replicas": replicas,
    "rollouts": rollouts,
}
#: Of no use to users by themselves, or no object with a docstring.
_WITHOUT = {
    courier.ExceptionReport,
    courier.PoolChoice,
    courier.Timing,
    lowlevel.SCRIPT_NAMES,
    lowlevel.AwaitedCall,
    lowlevel.Parcel,
    lowlevel.Pickler,
    lowlevel.Tasks,
    lowlevel.bound,
    lowlevel.call_records,
    lowlevel.names_in,
    lowlevel.require_running_clock,
    lowlevel.shortened,
    lowlevel.stand_in,
    lp.__version__,
}
_NAMES = sorted(
    f"{room}.{name}"
    for room, module in _ROOMS.items()
    for name in module.__all__
    if getattr(module, name) not in _WITHOUT
)


def _object(name: str) -> Any:
    room, _, rest = name.partition(".")
    return getattr(_ROOMS[room], rest)


def _is_a_kind_of_error_or_value(found: Any) -> bool:
    return inspect.isclass(found) and issubclass(found, BaseException | enum.Enum)


@pytest.mark.parametrize(
    "name", [n for n in _NAMES if not _is_a_kind_of_error_or_value(_object(n))]
)
def test_each_public_name_has_an_example_that_uses_what_exists(name: str) -> None:
    found = re.search(
        r"^Example:\n((?: {4}.*\n?|\n)+)", inspect.getdoc(_object(name)) or "", re.MULTILINE
    )
    assert found, f"the docstring of {name} has no example"
    for node in ast.walk(ast.parse(textwrap.dedent(found[1]))):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            room = _ROOMS.get(node.value.id)
            assert room is None or hasattr(room, node.attr), f"there is no {ast.unparse(node)}"
