"""Questions to nodes that end meanwhile, and to supervisors of other versions."""

import json
import queue
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from launchers.hosts.elsewhere import answer_for, supervise
from launchers.supervision.answers import Answers
from launchpad_lite.life.events import Answered

if TYPE_CHECKING:
    from launchpad_lite.launching import RunningProgram


def test_a_node_that_has_ended_answers_no_more_also_if_it_has_started_again() -> None:
    answers = Answers()
    number = answers.begin()
    answers.take_in(Answered("a[0]", number, {"x": 1}))
    answers.note_end("a[0]")  # after it has answered
    answers.note_end("b[0]")
    answers.note_end("c[0]")  # which was not asked
    found = answers.end(number, ["a[0]", "b[0]"], 60)
    assert found == {"a[0]": {"x": 1}, "b[0]": {"error": "it has ended meanwhile"}}


def test_a_supervisor_refuses_what_it_does_not_understand() -> None:
    program = cast("RunningProgram", SimpleNamespace(why=lambda: "none"))
    asked = (["1", "why", {}], ["2", "why", {"later": True}], ["3", "stop", {}], [])
    found = [json.loads(answer_for(program, json.dumps(each))) for each in asked]
    assert found[0] == {"value": "none", "error": ""}
    errors = ("unexpected keyword argument 'later'", "is not asked for 'stop'", "not enough values")
    assert all(text in each["error"] for text, each in zip(errors, found[1:], strict=True))


def test_a_question_that_takes_long_delays_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launchers.host.agent.allow_many_files", lambda: None)
    is_over, answered = threading.Event(), queue.Queue[str]()

    def ask(question: str) -> str:
        return "late" if is_over.wait(30) else "never"

    program = SimpleNamespace(ask=ask, why=lambda: "soon", join=is_over.wait)
    order = SimpleNamespace(
        stand_in=lambda: None, with_work=lambda _: None, shipment=lambda _: None
    )
    questions = [json.dumps(["1", "ask", {"question": "profile"}]), json.dumps(["2", "why", {}])]
    channel: Any = SimpleNamespace(
        look_s=0.01,
        tell=lambda _: None,
        question=lambda: questions.pop(0) if len(questions) > 1 else questions[0],
        answer=lambda _, text: answered.put(json.loads(text)["value"]),
    )
    signals: Any = SimpleNamespace(guard=lambda _: None)
    supervisor = threading.Thread(
        target=supervise, args=(order, {}, lambda *_: program, channel, signals)
    )
    supervisor.start()
    try:
        assert answered.get(timeout=30) == "soon"
    finally:
        is_over.set()
        supervisor.join()
    assert answered.get(timeout=30) == "late"
