"""Runs and epochs: what each of them makes, and where they go on after a restart."""

import itertools
import logging
import math
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import launchpad_lite as lp
from launchpad_lite import replicas
from launchpad_lite.replicas import _state
from launchpad_lite.replicas._state import Training
from launchpad_lite.testing import poll_until
from tests.engines import needs_torch
from tests.launchpad_lite.conftest import Run
from tests.launchpad_lite.replicas.together import in_memory, together


@pytest.mark.parametrize(
    "repl",
    [replicas.NonReplicator(), replicas.MultiWorkerReplicator(2), replicas.MultiGpuReplicator(2)],
    ids=str,
)
def test_each_run_makes_its_steps_with_its_input_from_the_start(repl: replicas.Replicator) -> None:
    def train(repl: replicas.Replicator) -> Any:
        def run(length: int) -> Any:
            batches = np.arange(2 * length).reshape(length, 2)
            list(repl.run(lambda batch: seen.append(int(batch[0])), lambda _: iter(batches)))

        made = [len(list(repl.run(lambda: 1, steps=5))) for _ in range(3)]
        seen: list[int] = []
        run(2)
        run(3)
        return made, repl.step, [each - seen[0] for each in seen]

    [first, *_] = repl.launch(train, launcher="test_mt")
    assert first == ([5, 5, 5], 20, [0, 2, 0, 2, 4])


def test_asynchronous_replicas_count_the_steps_of_each_run_together() -> None:
    def train(repl: replicas.Replicator) -> list[int]:
        made = [len(list(repl.run(lambda: 1, steps=5))) for _ in range(2)]
        evaluated = list(repl.run(lambda batch: batch, lambda _: range(3), counts=False))
        assert evaluated == [[0], [1], [2]]
        return [*made, len(list(repl.run(lambda batch: batch, lambda _: range(3))))]

    results = replicas.MultiWorkerAsyncReplicator(2).launch(train, launcher="test_mt")
    first, second, third = (sum(made) for made in zip(*results, strict=True))
    assert 10 <= first <= 11  # the last step of another one may be in flight
    assert 10 <= second <= 11
    assert third == 6


def test_an_evaluation_after_early_stopping_gets_all_batches() -> None:
    repl = replicas.NonReplicator()
    for _ in repl.run(lambda _: 1, lambda _: itertools.count()):
        if repl.step == 7:
            break
    evaluated = list(repl.run(lambda batch: batch, lambda _: range(4), counts=False))
    assert evaluated == [[0], [1], [2], [3]]
    assert repl.step == 7


@pytest.mark.parametrize(
    "repl", [replicas.NonReplicator(), replicas.MultiGpuReplicator(2)], ids=str
)
def test_a_run_in_the_loop_of_another_one_does_not_count(repl: replicas.Replicator) -> None:
    def train(repl: replicas.Replicator) -> Any:
        evaluated = 0
        for _ in repl.run(lambda _: 1, lambda _: np.zeros((4, 2))):
            evaluated += len(list(repl.run(lambda _: 1, lambda _: np.zeros((3, 2)))))
        return repl.step, evaluated

    assert repl.launch(train, launcher="test_mt")[0] == (4, 12)


def test_a_run_of_no_steps_is_told(caplog: pytest.LogCaptureFixture) -> None:
    repl = replicas.NonReplicator()
    list(repl.run(lambda _: 1, lambda _: iter(())))
    assert "replica: a run makes no step: its input has no batch" in caplog.text


def test_replicas_that_want_different_numbers_of_steps_are_told() -> None:
    def story(repl: replicas.Replicator) -> None:
        list(repl.run(lambda: 1, steps=5 + repl.replica_id))

    for error in together(in_memory(2), story):
        assert isinstance(error, replicas.CollectiveMismatchError)
        assert "all_gather of run(steps=6, counts=True, " in str(error)


class DiedError(Exception):
    """The process is gone."""


Event = tuple[Any, ...]


class Story:
    """A training that notes what happens, and dies with a snapshot after some steps."""

    def __init__(self) -> None:
        self.training = Training(is_saved=True)
        self.events: list[Event] = []
        self.dies_at = -1

    def begin(self) -> replicas.Replicator:
        """Begins the code, again perhaps."""
        repl = replicas.NonReplicator()
        self.training.begin()
        repl._me.training = self.training
        self.weights = np.zeros(1)
        repl.keep(weights=self.weights)
        return repl

    def run(self, repl: replicas.Replicator, name: Any, length: int) -> Iterator[int]:
        """Makes steps; each is an event."""

        def step_fn(batch: int) -> None:
            self.weights += 1
            self.events.append((name, batch))

        for _ in repl.run(step_fn, lambda _: range(length)):
            yield repl.step
            if repl.step == self.dies_at:
                self.training.take()
                raise DiedError

    def note(self, *what: Any) -> None:
        """Notes something that the code does with the weights."""
        self.events.append((*what, float(self.weights[0])))


def two_loops(story: Story) -> None:
    """Trains in epochs, with evaluations and early stopping; then a last run."""
    repl = story.begin()
    for epoch in repl.epochs(4):
        for _ in story.run(repl, epoch, 3):
            pass
        story.note("scored", epoch)
        for step in story.run(repl, f"more {epoch}", 3):
            if step % 6 == 5:
                break
        if epoch == 2:
            break
    for _ in story.run(repl, "last", 2):
        pass
    story.note("end")


def only_runs(story: Story) -> None:
    repl = story.begin()
    for name in "abc":
        for _ in story.run(repl, name, 3):
            pass


@pytest.mark.parametrize(("code", "steps"), [(two_loops, 19), (only_runs, 9)])
def test_a_training_goes_on_where_a_restart_interrupted_it(code: Any, steps: int) -> None:
    whole = Story()
    code(whole)
    made = [event for event in whole.events if event[0] not in ("scored", "end")]
    assert len(made) == steps
    # There is no snapshot where the code leaves a loop.
    for dies_at in [step for step in range(1, steps + 1) if step % 6 != 5 or code is only_runs]:
        story = Story()
        story.dies_at = dies_at
        with pytest.raises(DiedError):
            code(story)
        before = len(story.events)
        story.dies_at = -1
        code(story)
        rest = [event for event in story.events[before:] if event[0] not in ("scored", "end")]
        assert story.events[:before] == whole.events[: whole.events.index(made[dies_at - 1]) + 1]
        assert rest == made[dies_at:]
        assert story.events[-1] == whole.events[-1]


def test_a_checkpoint_of_other_code_is_refused() -> None:
    story = Story()
    story.dies_at = 2
    with pytest.raises(DiedError):
        only_runs(story)
    with pytest.raises(replicas.ReplicaError, match=r"call 1 is repl.epochs, but was repl.run"):
        two_loops(story)


def test_epochs_that_have_ended_are_not_entered_again(caplog: pytest.LogCaptureFixture) -> None:
    story = Story()
    story.dies_at = 8  # in the second run of the second epoch, of 5 steps each
    with pytest.raises(DiedError):
        two_loops(story)
    before = len(story.events)
    two_loops(story)
    scored = [event for event in story.events[before:] if event[0] == "scored"]
    assert scored == [("scored", 1, 8.0), ("scored", 2, 14.0)]
    assert "a run makes no step: its steps were made before a restart" in caplog.text


def test_a_training_that_has_ended_goes_on_with_more_epochs() -> None:
    story = Story()

    def train(number: int) -> None:
        repl = story.begin()
        for epoch in repl.epochs(number):
            for _ in story.run(repl, epoch, 2):
                pass

    train(2)
    train(3)
    assert story.events == [(epoch, batch) for epoch in range(3) for batch in range(2)]


def test_a_training_that_was_left_does_not_go_on() -> None:
    story = Story()
    for _ in range(2):
        repl = story.begin()
        with repl.being(repl._me):
            for step in story.run(repl, "run", 9):
                if step == 3:
                    break
            story.weights += 100
    assert story.events == [("run", batch) for batch in range(3)]
    assert story.weights == [203]


def endless(repl: replicas.Replicator, folder: Path) -> None:
    """Trains in epochs, and notes those that have ended."""
    weights = np.zeros(1)
    repl.keep(weights=weights)
    for epoch in repl.epochs(3):
        for _ in repl.run(lambda: weights.__iadd__(1)):
            (folder / "begun").touch()
            if (folder / "stop").exists():
                lp.stop()
        (folder / f"{epoch}.{repl.replica_id}").touch()


@pytest.mark.parametrize(
    "kind", [replicas.MultiWorkerReplicator, replicas.MultiWorkerAsyncReplicator]
)
def test_a_signal_raises_where_a_stop_by_a_node_ends_the_loop(tmp_path: Path, kind: Any) -> None:
    program = lp.Program("epochs")
    kind(2).add_to(program, endless, tmp_path)
    running = lp.launch(program, "test_mt", checkpoints={"replica": tmp_path / "checkpoints"})
    poll_until((tmp_path / "begun").exists, 20)
    running.request_stop("a test", signal.SIGTERM)
    with pytest.raises(SystemExit):
        running.wait(20)
    assert not list(tmp_path.glob("?.?"))
    (tmp_path / "stop").touch()
    with lp.launch(program, "test_mt", checkpoints={"replica": tmp_path / "checkpoints"}) as again:
        assert again.wait(20).outcome is lp.Outcome.STOPPED
    assert {path.name[0] for path in tmp_path.glob("?.?")} == {"0"}


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_without_checkpoints_the_state_comes_from_a_living_replica(
    victim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_state, "_GUARD_SHARE", math.inf)  # one at each step, on any machine

    def train(repl: replicas.Replicator) -> Any:
        weights = np.zeros(1)
        repl.keep(weights=weights)
        begun_at = repl.step
        assert weights == [begun_at]
        for _ in repl.run(lambda: weights.__iadd__(1), steps=40):
            if repl.step == 20 and repl.replica_id == victim and lp.restart_count() == 0:
                raise DiedError
        return begun_at, float(weights[0])

    again = {"restart": {"replica": "on_failure"}}
    results = replicas.MultiWorkerReplicator(3).launch(
        train, launcher="test_mt", launch_options=again
    )
    assert {weights for _, weights in results} == {40.0}
    assert 19 <= results[0][0] <= 20


def test_that_a_restart_begins_at_step_0_is_told_at_the_launch(
    caplog: pytest.LogCaptureFixture,
) -> None:
    options = {"restart": {"replica": "on_failure"}}
    with caplog.at_level(logging.WARNING):
        replicas.MultiWorkerReplicator(1).launch(
            lambda _: None, launcher="test_mt", launch_options=options
        )
    assert "replica[0]: without checkpoints, a restart begins at step 0" in caplog.text


@pytest.mark.slow
@needs_torch
def test_the_page_trains_in_epochs_and_what_has_ended_is_not_done_again(run_script: Run) -> None:
    page = (Path(__file__).parents[3] / "docs" / "replicas.md").read_text()
    [program] = re.findall(r"^```py\n(# epochs.py\n.*?)^```$", page, re.DOTALL | re.MULTILINE)
    first, second = run_script(program), run_script(program)
    assert first.returncode == 0, first.stderr
    assert "step 10: loss " in first.stdout
    assert "step " not in second.stdout
    assert first.stdout.splitlines()[-1] == second.stdout.splitlines()[-1]
