"""What a ReverbNode says before anything starts; Reverb itself need not be installed."""

import importlib.util
from typing import Any

import pytest

import launchpad_lite as lp


def make_tables() -> list[Any]:
    raise AssertionError("tables are made in the node")


class Learner:
    def __init__(self, replay: Any) -> None:
        self._replay = replay

    def run(self) -> None: ...


def _find(monkeypatch: pytest.MonkeyPatch, *, found: bool) -> None:
    find_spec = importlib.util.find_spec

    def find(name: str, package: str | None = None) -> Any:
        if name == "reverb":
            return find_spec("json") if found else None
        return find_spec(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", find)


def _program() -> lp.Program:
    program = lp.Program("replays")
    replay = program.add_node(lp.ReverbNode(make_tables), label="replay")
    program.add_node(lp.CourierNode(Learner, replay), label="learner")
    return program


def test_a_plan_shows_the_node_its_port_and_who_calls_it(monkeypatch: pytest.MonkeyPatch) -> None:
    _find(monkeypatch, found=True)
    plan = lp.plan(_program(), "local_mp")
    replay, learner = plan.executables
    assert replay.description == "ReverbNode(make_tables)"
    assert [address.name for address in replay.addresses] == ["reverb"]
    assert learner.calls == ("replay[0]",)
    with pytest.raises(lp.UnresolvedAddressError):
        lp.ReverbNode(make_tables).create_handle().dereference()


def test_where_reverb_is_missing_the_mistake_says_how_to_install_it_next_to_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _find(monkeypatch, found=False)
    with pytest.raises(lp.ProgramError) as raised:
        lp.plan(_program(), "local_mp", resources={"nobody": lp.Resources()})
    missing, unknown = sorted(raised.value.mistakes, key=lambda each: "nobody" in each)
    assert missing.startswith("replay[0]: ReverbNode(make_tables) needs Reverb")
    assert "pip install 'launchpad-lite[reverb]'" in missing
    assert "3.11" in missing
    assert "unknown group 'nobody'" in unknown


def test_a_period_without_a_place_is_a_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    _find(monkeypatch, found=True)
    program = lp.Program("nowhere")
    program.add_node(lp.ReverbNode(make_tables, None, 5), label="replay")
    with pytest.raises(lp.ProgramError, match="but no folder: give ReverbNode a checkpoint_"):
        lp.plan(program, "local_mp")
    assert lp.plan(program, "local_mp", checkpoints={"replay": "a_folder"}).executables


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (([],), TypeError, "ReverbNode takes a class or function"),
        ((make_tables, "folder"), TypeError, "checkpoint_ctor is a function"),
        ((make_tables, None, "1"), TypeError, "is a number, not '1'"),
        ((make_tables, None, True), TypeError, "is a number, not True"),
        ((make_tables, None, 0), ValueError, "_delta_minutes cannot be 0: it is above 0"),
        ((make_tables, None, float("inf")), ValueError, "cannot be inf: it is above 0 and finite"),
    ],
)
def test_mistakes_are_told_where_they_are_made(
    arguments: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        lp.ReverbNode(*arguments)
