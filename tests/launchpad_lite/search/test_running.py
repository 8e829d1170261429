"""Whole searches, with their parts as threads."""

import contextlib
import csv
import functools
import io
import os
import re
import threading
import time

import pytest

import launchpad_lite as lp
from launchpad_lite import engines, replicas, search
from launchpad_lite.search import running
from launchpad_lite.search._model_node import Status
from launchpad_lite.search._sqlite import SqliteStore
from launchpad_lite.search.running import Table
from tests.courier.waiting import wait_until
from tests.launchpad_lite.search.tasks_for_tests import QUICK, Tasks, climb, fail, square, squares

run = functools.partial(search.run, launcher="local_mt", workers=2, timing=QUICK)


def test_each_task_is_run_and_told_once():
    result = run(squares(30))
    assert sorted(result.model.results) == [x * x for x in range(30)]
    assert result.best is not None
    assert (result.best.number, result.best.score) == (29, 29 * 29)
    assert {trial.state for trial in result.trials} == {search.TrialState.DONE}


def test_a_table_of_the_trials_has_their_parameters(tmp_path):
    result = run(Tasks(search.Call(climb, x=3, steps=2), lambda: "no number"), folder=tmp_path)
    with (tmp_path / "trials.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["state"], row["score"], row["params.x"]) for row in rows] == [
        ("done", "3.0", "3"),
        ("done", "", ""),
    ]
    assert result.trials[0].curve == [(0, 3.0), (1, 4.0)]


def test_a_model_stops_a_task_by_what_it_reports():
    class Impatient(Tasks):
        def report(self, task, step, value):
            return value >= 3

    result = run(Impatient(search.Call(climb, 0), search.Call(climb, 1)))
    assert [trial.state for trial in result.trials] == [search.TrialState.STOPPED] * 2
    assert all(value >= 3 for value in result.model.early)


def test_a_task_that_raises_is_a_failed_trial_with_the_line_that_raised(tmp_path, caplog):
    result = run(Tasks(search.Call(fail, "key"), search.Call(square, 3)), folder=tmp_path)
    assert result.model.results == [9]
    (failed,) = [trial for trial in result.trials if trial.state is search.TrialState.FAILED]
    assert "fail('key') on search_worker" in failed.error
    assert 'tasks_for_tests.py", line ' in failed.error
    assert failed.error.endswith("raise KeyError(x)\nKeyError: 'key'")
    with (tmp_path / "trials.csv").open() as file:
        assert failed.error in [row["error"] for row in csv.DictReader(file)]
    assert f"trial {failed.number} has failed: {failed.error}" in caplog.text


def _gone():
    raise ModuleNotFoundError("No module named 'gone'")


class _Unreadable:
    def __reduce__(self):
        return _gone, ()


class Picky(Tasks):
    """Takes nothing but whole numbers."""

    def tell(self, task, result):
        super().tell(task, result + 0)

    def report(self, task, step, value):
        return bool(1 // int(value - 2))

    def fail(self, task, error):
        if "climb" in str(error):
            raise LookupError("who?")
        self.results.append(error)


def test_what_a_model_cannot_be_told_is_a_failed_trial_and_the_search_goes_on(tmp_path):
    tasks = (
        search.Call(lambda: None),
        search.Call(_Unreadable),
        search.Call(climb, 2, steps=2),
        search.Call(square, 3),
    )
    result = run(Picky(*tasks), folder=tmp_path)
    none, unreadable, reported, good = result.trials
    failed = [trial.state for trial in (none, unreadable, reported)]
    assert (failed, good.score) == ([search.TrialState.FAILED] * 3, 9.0)
    assert "the model did not take its result: TypeError: unsupported operand" in none.error
    assert "result + 0" in none.error
    assert "the model did not take its result: ModuleNotFoundError: No mod" in unreadable.error
    assert "ZeroDivisionError" in reported.error
    assert "The model was not told: fail() raised LookupError: who?" in reported.error
    assert [trial.is_told for trial in result.trials] == [True, True, False, True]
    assert [type(each) for each in result.model.results if each != 9] == [
        search.FailedTaskError
    ] * 2
    assert (tmp_path / "trials.csv").exists()


def test_a_search_that_stopped_because_all_failed_goes_on_with_a_function_that_works(tmp_path):
    with pytest.raises(search.SearchError, match=r"the first \d+ trials .*KeyError"):
        run(_random(fail, 30), folder=tmp_path, ahead=2)
    assert (tmp_path / "trials.csv").exists()
    result = run(_random(lambda candidate: 2.0, 30), folder=tmp_path, resume="anyway")
    assert len(result.trials) == 30
    states = {trial.state for trial in result.trials}
    assert states == {search.TrialState.FAILED, search.TrialState.DONE}


_kept: dict[int, search.Task] = {}


def _keep(key):
    return _kept[key]


def test_a_search_whose_first_tasks_all_fail_says_so():
    with pytest.raises(search.SearchError, match=r"the first \d+ trials have failed"):
        run(_random(fail, 100))
    with pytest.raises(search.SearchError, match="all trials have failed"):
        run(_random(fail, 2))
    program = lp.Program("part")
    search.add_to(program, _random(fail, 2), workers=1, timing=QUICK)
    with pytest.raises(lp.NodeFailedError, match="all trials have failed"):
        lp.launch(program, "local_mt").wait(30)


def test_a_task_that_cannot_be_pickled_is_named():
    with pytest.raises(lp.NodeFailedError, match=r"the task square\(<unlocked.*cannot be pickled"):
        run(_Locks())


class _Locks(search.Model):
    def ask(self):
        return search.Call(square, threading.Lock())


def test_a_result_that_cannot_travel_is_an_error_of_its_task():
    with pytest.raises(search.SearchError, match=r"the result of .* cannot be pickled"):
        run(Tasks(search.Call(threading.Lock)))


def test_a_kind_that_no_worker_takes_is_said(capsys):
    class Ends(Tasks):
        end_at = time.monotonic() + 1.2

        def done(self):
            return time.monotonic() > self.end_at

    run(Ends(search.Foreign("cobol", b"")), progress=True)
    assert "tasks of kind 'cobol' wait, and no worker takes them" in capsys.readouterr().err


def test_a_search_may_have_no_workers_of_its_own_if_others_can_join(tmp_path):
    assert run(Tasks(), workers=0, folder=tmp_path).trials == []
    with pytest.raises(ValueError, match="1 broker and 1 workers, not 1 and 0; with folder="):
        run(Tasks(), workers=0)


def test_a_result_shows_itself_on_one_screen():
    result = run(_random(lambda candidate: 1.0, 40))
    lines = repr(result).splitlines()
    assert re.fullmatch(r"40 trials in [\d.]+ s: 40 done", lines[0])
    assert lines[1].startswith("best: trial 0, score 1.0, {'x': 0.8444")
    assert len(lines) == 2


def test_brokers_help_each_other():
    """The model uses one broker, and each of two workers another one."""
    result = run(Tasks(*[search.Call(climb, x, steps=20) for x in range(6)]), brokers=2)
    assert {trial.worker for trial in result.trials} == {"search_worker[0]", "search_worker[1]"}


def test_a_search_is_a_part_of_a_program_that_ends_with_it():
    program = lp.Program("parts")
    handle = search.add_to(program, squares(5), workers=2, brokers=2, timing=QUICK)
    seen = []

    def watch(model):
        while not (status := model.wait(0.1)).is_over:
            pass
        seen.append(status)

    program.add_node(lp.PyNode(watch, handle), label="watch")
    assert lp.launch(program, "local_mt").wait(30).outcome is lp.Outcome.COMPLETED
    assert seen[0].done == 5


@pytest.mark.parametrize(
    ("mistake", "text"),
    [
        ({"workers": -1}, "1 workers, not 1 and -1"),
        ({"brokers": 0}, "at least 1 broker"),
        ({"ahead": 0}, "at least 1 task is outstanding"),
    ],
)
def test_numbers_that_are_too_small_are_refused(mistake, text):
    with pytest.raises(ValueError, match=text):
        search.add_to(lp.Program("p"), squares(1), **{"workers": 1, **mistake})


def test_a_damaged_file_of_a_broker_is_said_before_anything_starts(tmp_path):
    (tmp_path / "brokers").mkdir()
    (tmp_path / "brokers" / "search_broker[0].sqlite").write_bytes(b"damage" * 1000)
    with pytest.raises(search.StoreError, match=r"search_broker\[0\].sqlite: .* move it away"):
        run(squares(1), folder=tmp_path)


def test_a_folder_is_for_this_user_only_whatever_the_umask(tmp_path):
    umask = os.umask(0)
    try:
        run(squares(3), folder=tmp_path / "run")
    finally:
        os.umask(umask)
    made = [tmp_path / "run", *(tmp_path / "run").rglob("*")]
    open_folders = [path for path in made if path.is_dir() and path.stat().st_mode & 0o077]
    open_files = [path for path in (tmp_path / "run").glob("*.*") if path.stat().st_mode & 0o077]
    assert (open_folders, open_files) == ([], [])
    assert {path.name for path in made} >= {"trials.csv", "model", "brokers"}


def test_a_second_search_in_a_folder_is_refused_by_who_uses_it(tmp_path, monkeypatch):
    run(squares(1), folder=tmp_path)
    monkeypatch.setattr("launchpad_lite.search.running.RELEASE_S", 0.0)
    who = rf"broker\[0\].sqlite: process {os.getpid()} on {os.uname().nodename} uses this file; "
    with (
        contextlib.closing(SqliteStore(tmp_path / "brokers" / "search_broker[0].sqlite")),
        pytest.raises(search.StoreInUseError, match=who),
    ):
        run(squares(2), folder=tmp_path)


def test_what_is_no_model_is_refused():
    with pytest.raises(TypeError, match=r"takes a search\.Model"):
        run(square)


def _execute():
    with search.Executor(2, launcher="local_mt", timing=QUICK) as executor:
        assert executor.submit(square, 3).result() == 9


def _count():
    with engines.MapReduce(2, launcher="local_mt") as mr:
        assert mr.load(range(10)).count() == 10


def _replicate():
    assert replicas.MultiWorkerReplicator(2).launch(lambda repl: 3, launcher="local_mt") == [3, 3]


@pytest.mark.parametrize("work", [lambda: run(squares(2)), _execute, _count, _replicate])
def test_a_program_whose_work_is_done_is_completed(work, monkeypatch):
    launched = []
    launch = lp.launch

    def launch_and_note(*args, **options):
        launched.append(launch(*args, **options))
        return launched[-1]

    monkeypatch.setattr(lp, "launch", launch_and_note)
    work()
    (running,) = launched
    assert running.result.outcome is lp.Outcome.COMPLETED


def test_a_search_in_a_pipe_prints_a_row_now_and_then(monkeypatch):
    out = io.StringIO()
    table, status = Table(None, out), Status(queued=3, running=2, done=1, again=6, lost=5)
    table.show(status)
    table.show(status._replace(is_over=True))
    assert not out.getvalue()  # a search that is over soon prints nothing
    monkeypatch.setattr(running, "_ROW_S", 0.0)
    table.show(status)
    assert [line.split()[:7] for line in out.getvalue().splitlines()] == [
        ["queued", "running", "done", "failed", "stopped", "again", "lost"],
        ["3", "2", "1", "0", "0", "6", "5"],
    ]


def test_as_many_trials_are_said_to_run_as_workers_are_busy():
    program = lp.Program("busy")
    begun, may_end = threading.Barrier(4), threading.Event()
    tasks = [_Waits(begun, may_end) for _ in range(3)]
    _kept.update({id(task): task for task in tasks})
    handle = search.add_to(program, Tasks(*tasks), workers=3, timing=QUICK)
    with lp.launch(program, "local_mt") as running:
        begun.wait(20)
        node = handle.dereference()
        wait_until(lambda: (node.status().queued, node.status().running) == (0, 3))
        may_end.set()
        running.wait(20)


class _Waits(search.Task):
    """Waits until others run as well, and until it may end."""

    def __init__(self, begun, may_end):
        self._begun, self._may_end = begun, may_end

    def run(self):
        self._begun.wait(20)
        self._may_end.wait(20)
        return 1

    def __reduce__(self):
        return _keep, (id(self),)


def _draw(rng):
    return {"x": rng.random()}


def _random(evaluate, trials, **options):
    return search.RandomSearch(evaluate, _draw, trials, **options)


def _first(candidate):
    return 1.0


def test_a_search_that_has_ended_goes_on_to_more_trials_with_the_newest_functions(tmp_path, capfd):
    run(_random(lambda candidate: 1.0, 3), folder=tmp_path)
    result = run(_random(lambda candidate: 2.0, 6), folder=tmp_path)
    assert [trial.score for trial in result.trials] == [1.0] * 3 + [2.0] * 3
    assert len({trial.params["x"] for trial in result.trials}) == 6, "the same was drawn again"
    assert "complete, from" not in capfd.readouterr().err
    result = run(_random(lambda candidate: 3.0, 5), folder=tmp_path)
    assert len(result.trials) == 6
    assert f"search: complete, from {tmp_path}: 6 trials" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (_random(_first, 4, seed=1), "its seed is 1, and was 0"),
        (_random(_first, 4, maximize=False), "its maximize is False, and was True"),
        (_random(square, 4), "its function is square, and was _first"),
        (
            search.RandomSearch(_first, lambda rng: {"y": 1}, 4),
            r"its sample is <lambda>, and was _draw",
        ),
        (search.SuccessiveHalving(_first, _draw, 4), "algorithm is SuccessiveHalving, and was"),
    ],
)
def test_another_search_in_a_folder_is_refused_by_what_differs(other, text, tmp_path):
    run(_random(_first, 2), folder=tmp_path)
    with pytest.raises(search.SearchError, match=text) as refused:
        run(other, folder=tmp_path)
    assert (
        'Name a new folder, or go on with what is kept there: search.run(..., resume="any'
        in str(refused.value)
    )
    assert len(run(_random(_first, 3), folder=tmp_path).trials) == 3, "it has changed the folder"


def test_another_search_goes_on_in_a_folder_if_it_is_to(tmp_path):
    run(_random(_first, 2), folder=tmp_path)
    result = run(_random(lambda candidate: 2.0, 4, seed=1), folder=tmp_path, resume="anyway")
    assert [trial.score for trial in result.trials] == [1.0, 1.0, 2.0, 2.0]
    other = search.SuccessiveHalving(_first, _draw, 3)
    result = run(other, folder=tmp_path, resume="anyway")
    assert isinstance(result.model, search.SuccessiveHalving)
    assert len(result.trials) == 7


def test_a_model_of_another_name_does_not_take_the_place_of_one_whose_state_is_kept(tmp_path):
    kept = {"search_model": tmp_path}

    def start(model):
        program = lp.Program("part")
        search.add_to(program, model, workers=1, timing=QUICK)
        lp.launch(program, "local_mt", checkpoints=kept).wait(30)

    start(squares(2))
    with pytest.raises(lp.NodeFailedError, match="of a search by Tasks, and this one is by Random"):
        start(_random(_first, 2))


@pytest.mark.parametrize("file", ["search_broker[0].sqlite", "trials/0/weights"])
def test_a_folder_of_an_earlier_version_or_another_program_is_refused(tmp_path, file):
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).touch()
    with pytest.raises(search.SearchError, match=r"an earlier version .* Name a new folder"):
        run(squares(1), folder=tmp_path)
    assert (tmp_path / file).exists()


def test_what_a_folder_may_be_used_for_is_one_of_two(tmp_path):
    with pytest.raises(ValueError, match='resume is "same" or "anyway"'):
        run(squares(1), folder=tmp_path, resume="always")


def test_files_of_trials_that_a_kill_has_lost_are_not_there_for_those_with_their_numbers(tmp_path):
    run(_random(_first, 2), folder=tmp_path)
    for number in (1, 2):
        (tmp_path / "trials" / str(number)).mkdir(parents=True)
        (tmp_path / "trials" / str(number) / "weights").touch()
    run(
        _random(lambda _: len(list(search.current_trial().folder.iterdir())), 3),
        folder=tmp_path,
        resume="anyway",
    )
    left = [path.parent.name for path in (tmp_path / "trials").rglob("weights")]
    assert left == ["1"]


class Told(search.Callback):
    """Keeps what it is told, and who told it."""

    def __init__(self):
        self.told = _told  # as a file would be, it is not in the pickle

    def __reduce__(self):
        return Told, ()

    def on_trial_start(self, trial):
        self._note("start", trial)

    def on_trial_report(self, trial, step, value):
        assert (step, value) == trial.curve[-1]
        self._note("report", trial)

    def on_trial_end(self, trial):
        self._note(trial.state.value, trial)

    def _note(self, what, trial):
        self.told.setdefault(trial.number, []).append(what)
        self.told.setdefault("node", set()).add(lp.current_node().name)


_told: dict[object, object] = {}


class Raising(search.Callback):
    def on_trial_report(self, trial, step, value):
        raise OSError("the disk is full")

    def on_trial_end(self, trial):
        raise OSError("the disk is full")


def test_callbacks_are_told_of_each_trial_in_order_whatever_others_raise(caplog):
    class Halting(Tasks):
        def report(self, task, step, value):
            return value >= 3

    _told.clear()
    tasks = (search.Call(climb, 1, steps=2), search.Call(climb, 2), search.Call(fail, "key"))
    result = run(Halting(*tasks), callbacks=[Raising(), Told()])
    assert _told.pop("node") == {"search_model[0]"}
    assert _told[0] == ["start", "report", "report", "done"]
    assert (_told[1][:2], _told[1][-1]) == (["start", "report"], "stopped")
    assert _told[2] == ["start", "failed"]
    assert [trial.state.value for trial in result.trials] == ["done", "stopped", "failed"]
    said = [record for record in caplog.records if "callback" in record.getMessage()]
    assert [record.getMessage() for record in said] == [
        "callback Raising.on_trial_report has raised; the search goes on"
    ]
    assert "OSError: the disk is full" in caplog.text


def test_a_search_ends_when_its_model_is_done_and_callbacks_are_told_what_it_gives_up():
    class First(Tasks):
        def done(self):
            return bool(self.results)

    _told.clear()
    tasks = search.Call(square, 2), search.Call(climb, 0, pause_s=0.001)
    assert run(First(*tasks), callbacks=[Told()]).model.results == [4]
    assert (_told[0], _told[1][0], _told[1][-1]) == (["start", "done"], "start", "stopped")
