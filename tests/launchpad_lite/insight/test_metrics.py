"""Numbers of nodes: `lp.metrics` and `lp.log`, and what a supervisor hears of them."""

import json
import math
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import launchpad_lite as lp
from launchpad_lite.insight import metrics
from launchpad_lite.insight._curves import Curves
from launchpad_lite.insight.history import FollowedHistory
from launchpad_lite.insight.metrics import numbers
from launchpad_lite.testing import LaunchedProgram, poll_until
from launchpad_lite.worker.runtime import current_runtime

Launch = Callable[..., LaunchedProgram]


class Counting:
    def __init__(self, count: int) -> None:
        self._count = count

    def run(self) -> None:
        for each in range(self._count):
            lp.metrics.counter("steps").add()
            lp.metrics.gauge("train/epsilon").set(1 - each)
            lp.metrics.histogram("return").observe(each)
        lp.log({"loss": 0.25, "worst": math.nan}, step=self._count)
        lp.wait_for_stop()


@pytest.mark.parametrize("launcher", ["test_mt", "test_mp"])
def test_each_node_tells_its_own_numbers(launch_program: Launch, launcher: str) -> None:
    program = lp.Program("counting")
    with program.group("node"):
        for count in (2, 4):
            program.add_node(lp.PyClassNode(Counting, count))
    running = launch_program(program, launcher).running

    def told() -> dict[str, Any] | None:
        answers = running.ask("numbers")
        found = {node: each["metrics"] for node, each in answers.items()}
        return found if len(found) == 2 and all(found.values()) else None

    numbers = poll_until(told)
    assert numbers["node[0]"]["counter"] == {"steps": 2}
    assert (
        numbers["node[1]"]
        == {
            "counter": {"steps": 4},
            "gauge": {"train/epsilon": -2},
            "histogram": {"return": {"count": 4, "sum": 6, "buckets": [[0, 1], [2, 1], [4, 2]]}},
            "view": {},
            "log": {"loss": 0.25, "worst": None},
            "step": 4,
        }
        or launcher == "test_mt"
    )  # where tuples stay tuples


def _launch(launch_program: Launch, node: lp.Node[Any], launcher: str = "test_mp") -> Any:
    program = lp.Program("single")
    program.add_node(node, label="node")
    return launch_program(program, launcher)


class _BrokenError(KeyError):
    def __str__(self) -> str:
        raise self


def _broken() -> None:
    raise _BrokenError("key")


class _Growing:
    """A large number, in a mapping that changes while it is read."""

    def __init__(self, mapping: dict[Any, Any]) -> None:
        self._mapping = mapping

    def __float__(self) -> float:
        self._mapping["more"] = 1
        return 1e308


def _grow() -> dict[Any, Any]:
    mapping: dict[Any, Any] = {}
    mapping["large"] = _Growing(mapping)
    return mapping


class Viewed:
    def __init__(self) -> None:
        self._count = 0
        lp.metrics.view("text", lambda: "replaced")
        lp.metrics.view("text", lambda: f"{self._count} done\n\x1b[31mred")
        lp.metrics.view("bars", lambda: {1: 2, "b": self._count})
        lp.metrics.view("broken", _broken)
        lp.metrics.view("grows", _grow)

    def run(self) -> None:
        self._count = 4
        lp.wait_for_stop()
        self._count = 8


def _views(folder: Path | None) -> dict[str, str]:
    curves = Curves()
    assert folder is not None
    curves.take_in(FollowedHistory(folder).read()[1])
    return curves.views()


def test_views_are_read_when_somebody_looks_and_at_the_end(launch_program: Launch) -> None:
    launched = _launch(launch_program, lp.PyClassNode(Viewed))
    folder = launched.running.log_dir

    def seen() -> dict[str, str]:
        launched.running.ask("numbers")  # as the page does
        return _views(folder)

    poll_until(lambda: "4 done" in seen().get("text", ""))
    launched.stop()
    bar = "█"
    assert _views(folder) == {
        "bars": f"node[0]\n1 {6 * bar:24} 2\nb {24 * bar} 8",
        "broken": "node[0]\n" + traceback.format_exception_only(_BrokenError())[0].rstrip(),
        "grows": f"node[0]\nlarge {24 * bar} 1e+308",
        "text": "node[0]\n8 done\nred",
    }


def test_a_view_that_does_not_return_holds_up_neither_the_stop_nor_later_questions(
    launch_program: Launch,
) -> None:
    launched = _launch(launch_program, lp.PyNode(_block))

    def views() -> object:
        answer = launched.running.ask("numbers", timeout_s=0.1).get("node[0]", {})
        return answer.get("metrics", {}).get("view")

    poll_until(lambda: views() == {"blocked": None})
    launched.stop()


def _block() -> None:
    lp.metrics.view("blocked", lp.wait_for_stop)
    lp.wait_for_stop()


_MAY_RETURN = threading.Event()


def _leave_a_view() -> None:
    lp.metrics.view("blocked", _MAY_RETURN.wait)


def test_a_node_ends_whose_views_do_not_return(
    launch_program: Launch, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(metrics, "_VIEWS_S", 0.0)
    _launch(launch_program, lp.PyNode(_leave_a_view), "test_mt").wait()
    _MAY_RETURN.set()
    assert "views that do not return: ['blocked']" in caplog.text


class Logging:
    def run(self) -> None:
        for step in range(1000):
            lp.log({"loss": 1 / (step + 1)}, step=step)
        lp.log({"accuracy": 0.5})


def test_a_node_prints_the_first_and_the_last_of_many_logged_values(launch_program: Launch) -> None:
    launched = _launch(launch_program, lp.PyClassNode(Logging))
    launched.wait()
    lines = [line.decode() for _, line in launched.running.output()]
    assert lines == ["step 0: loss=1\n", "accuracy=0.5 loss=0.001\n"]


_TOO_MANY = (
    "this node has 1000 metrics already, without {!r}: names are for kinds of things, not for "
    "each of them"
)


def test_names_and_values_that_cannot_be_are_refused(launch_program: Launch) -> None:
    found: list[str] = []

    def call(*functions: Callable[[], object]) -> None:
        for each in functions:
            with pytest.raises((TypeError, ValueError)) as raised:
                each()
            found.append(str(raised.value))

    def run() -> None:
        lp.metrics.counter("n").add(2)
        call(
            lambda: lp.metrics.counter("1st"),
            lambda: lp.metrics.gauge("n"),
            lambda: lp.metrics.counter("n").add(-1),
            lambda: lp.metrics.gauge("g").set(math.inf),
            lambda: lp.metrics.histogram("h").observe("3"),  # type: ignore[arg-type]
            lambda: lp.log({"a b": 1}),
            lambda: lp.log({"loss": [1, 2]}),  # type: ignore[dict-item]
            lambda: lp.log({"loss": 1}, step=0.5),  # type: ignore[arg-type]
            lambda: lp.log(0.3),  # type: ignore[arg-type]
            lambda: lp.log({f"user{each}": 1 for each in range(2000)}),
            lambda: [lp.metrics.counter(f"user{each}") for each in range(1000)],
        )

    _launch(launch_program, lp.PyNode(run), "local_mt").wait()
    names = "up to 100 letters, digits and _ . / - that begin with a letter"
    assert found == [
        f"'1st' is no name of a metric: {names}",
        "'n' is a counter of this node already",
        "the counter 'n' only grows, and cannot add -1",
        "'g' is a finite number, not inf",
        "'h' is a number, not '3'",
        f"'a b' is no name of a metric: {names}",
        "'loss' is a number, not [1, 2]",
        "lp.log: step is a whole number, not 0.5",
        "lp.log takes values by name, as {'loss': 0.3}, not 0.3",
        _TOO_MANY.format("user1000"),
        _TOO_MANY.format("user997"),
    ]


def test_sums_that_are_too_large_are_left_out(launch_program: Launch) -> None:
    found = []

    def run() -> None:
        runtime = current_runtime()
        for value in (1e308, 1.7e308):
            lp.metrics.counter("n").add(value)
            lp.metrics.histogram("h").observe(value)
        metrics = numbers(runtime, None, None)["metrics"]
        found.append((metrics["counter"], metrics["histogram"]["h"]["buckets"]))
        json.dumps(metrics["counter"], allow_nan=False)

    _launch(launch_program, lp.PyNode(run), "local_mt").wait()
    assert found == [({"n": None}, [[2.0**1023, 2]])]
