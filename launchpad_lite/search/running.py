"""A search as a program of its own, or as a part of one."""

import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TextIO

import courier
import launchpad_lite as lp
from launchpad_lite.parts.private_files import open_private
from launchpad_lite.search._model_node import ModelNode, Status
from launchpad_lite.search._parts import RELEASE_S, RESTART, BrokerOptions, add_parts
from launchpad_lite.search._postgres import held_database
from launchpad_lite.search._resuming import begin
from launchpad_lite.search._sqlite import check_files
from launchpad_lite.search._timing import DEFAULT, Timing
from launchpad_lite.search.errors import LOST, SearchError
from launchpad_lite.search.models import Callback, Model
from launchpad_lite.search.results import Result

if TYPE_CHECKING:
    from launchpad_lite.launching import Launcher

#: Seconds between two looks at a search.
_SHOW_S = 0.5
_WIDTHS = {
    "queued": 7,
    "running": 8,
    "done": 7,
    "failed": 7,
    "stopped": 8,
    "again": 6,
    "lost": 5,
    "workers": 8,
    "best": 12,
}
#: Seconds between two rows where the output is no terminal.
_ROW_S = 10.0
_BAR = 16


def add_to(
    program: lp.Program,
    model: Model,
    *,
    workers: int,
    brokers: int = 1,
    label: str = "search",
    folder: "str | os.PathLike[str] | None" = None,
    database: str | None = None,
    ahead: int | None = None,
    max_losses: int = 5,
    timing: Timing = DEFAULT,
    callbacks: Sequence[Callback] = (),
) -> lp.Handle[ModelNode]:
    """Adds a search to a program; returns a handle, by which other nodes see its progress.

    Its nodes end when the search is over. Launch with `restart=` for the groups `<label>_worker`,
    `<label>_broker` and `<label>_name_server`, so that lost nodes come back, and with
    `checkpoints=` for `<label>_model`, so that the search goes on from there.

    Args:
        program: What to add it to.
        model: Decides what is tried.
        workers: How many there are at first; others may join.
        brokers: How many; more than one for many workers, or several sites.
        label: The beginning of the names of its groups.
        folder: Where brokers keep their tasks, so that a lost one loses none; None: in memory,
            and the model sends again what a broker has lost.
        database: Where they keep them instead: a PostgreSQL database, as
            `postgresql://user@host/database`. There brokers take over from each other. Needs
            `launchpad-lite[postgres]`.
        ahead: How many tasks may be outstanding at a time; None: a few more than workers, and the
            more, the shorter they are.
        max_losses: How often a task may lose its worker until it fails.
        timing: How long the parts wait for each other.
        callbacks: Are told of each trial.

    Raises:
        TypeError: It is no model.
        ValueError: A number is too small, the program has such a group, or the model needs a folder.

    Example:
        handle = search.add_to(program, Grid(rates), workers=8)
        program.add_node(lp.CourierNode(Report, handle), label="report")
    """
    return _add(
        program,
        model,
        BrokerOptions(timing, None if folder is None else os.fspath(folder), database, max_losses),
        workers=workers,
        brokers=brokers,
        label=label,
        ahead=ahead,
        callbacks=callbacks,
    )


def _add(
    program: lp.Program,
    model: Model,
    options: BrokerOptions,
    *,
    workers: int,
    brokers: int,
    label: str,
    ahead: int | None,
    **of_model: Any,
) -> lp.Handle[ModelNode]:
    if not isinstance(model, Model):
        raise TypeError(f"a search takes a search.Model, not {model!r}")
    if model.needs_folder and options.folder is None:
        who = type(model).__name__
        raise ValueError(f"{who} needs folder=: its trials go on from the folders of others")
    if ahead is not None and ahead < 1:
        raise ValueError(f"at least 1 task is outstanding at a time (ahead), not {ahead}")
    parts = add_parts(program, workers=workers, brokers=brokers, label=label, options=options)
    node = lp.CourierNode(
        ModelNode, model, *parts, options.timing, ahead, folder=options.folder, **of_model
    )
    return program.add_node(node, label=f"{label}_model")


def run(
    model: Model,
    *,
    workers: int | None = None,
    brokers: int = 1,
    launcher: "str | Launcher" = "local_mp",
    folder: "str | os.PathLike[str] | None" = None,
    database: str | None = None,
    total: int | None = None,
    ahead: int | None = None,
    max_losses: int = 5,
    timing: Timing = DEFAULT,
    progress: bool = True,
    resume: Literal["same", "anyway"] = "same",
    callbacks: Sequence[Callback] = (),
    **launch_options: Any,
) -> Result:
    """Runs a search, and returns its results.

    Ctrl-C stops it in order. With a folder, the same call goes on from there, with the newest code
    of the script; also to more trials.

    Args:
        model: Decides what is tried. It runs in a node; the result has its final state.
        workers: How many; by default as many as this process may use cores.
        brokers: As for `add_to`.
        launcher: Where it runs, as for `lp.launch`.
        folder: Where the state of the search is kept: the model, what brokers have accepted, and at
            the end `trials.csv`. None: nowhere.
        database: As for `add_to`.
        total: How many trials there will be, for the bar; by default what the model has as `total`.
        ahead: As for `add_to`.
        max_losses: As for `add_to`.
        timing: As for `add_to`.
        progress: Whether to show how far it is: one row on a terminal, a row every 10 s elsewhere.
        resume: What to do if the folder has a search with another space, seed, algorithm or function.
            `"same"`: that is an error. `"anyway"`: to go on with it, for so many trials in all; the
            model keeps what it has learnt if the algorithm is the same.
        callbacks: As for `add_to`.
        **launch_options: As for `lp.launch`: `resources`, `hosts`, `restart`, ..

    Raises:
        SearchError: It was stopped before its end, the first 10 trials or all of them have failed, or the
            folder has another search.
        NodeFailedError: The model, a broker or a worker has failed for good.
        StoreInUseError: Another search uses the folder or the database.
        StoreError: The store of a broker there is damaged.
        TypeError: As for `add_to`.
        ValueError: As for `add_to`.

    Example:
        result = search.run(search.RandomSearch(train, sample, trials=100), workers=8)
        print(result.best)
    """
    if resume not in ("same", "anyway"):
        raise ValueError(f'resume is "same" or "anyway", not {resume!r}')
    program = lp.Program("search")
    kept = None if folder is None else Path(folder).absolute()
    handle = _add(
        program,
        model,
        BrokerOptions(timing, None if kept is None else str(kept), database, max_losses),
        workers=len(os.sched_getaffinity(0)) if workers is None else workers,
        brokers=brokers,
        label="search",
        ahead=ahead,
        stays=True,
        callbacks=callbacks,
        anyway=resume == "anyway",
    )
    options = dict(launch_options)
    restart = options.pop("restart", {})
    if isinstance(restart, Mapping):
        groups = ("search_name_server", "search_broker", "search_worker")
        there = [group for group in groups if group in program.groups]  # without workers: no group
        restart = {**dict.fromkeys(there, RESTART), **restart}
    table = Table(getattr(model, "total", total) if total is None else total) if progress else None
    with held_database(database, timing.silence_s):
        if kept is not None:
            check_files(kept, RELEASE_S)
            is_elsewhere = "checkpoints" in options
            for file in begin(kept, model, anyway=resume == "anyway", is_elsewhere=is_elsewhere):
                _say(f"{file} has changed: what is tried from now on runs its newest code")
            options.setdefault("checkpoints", {"search_model": kept / "model"})
        running = lp.launch(program, launcher, restart=restart, **options)
        try:
            result, status = _follow(running, handle, table)
            result = replace(result, folder=kept)
            running.complete()
        finally:
            running.stop()
    if kept is not None:
        os.close(open_private(kept / "trials.csv", is_new=True))
        result.to_csv(kept / "trials.csv")
    if status.failure:
        raise SearchError(status.failure)
    if status.was_over:
        _say(f"complete, from {kept}: {len(result.trials)} trials")
    return result


def _say(text: str) -> None:
    print(f"search: {text}", file=sys.stderr)  # noqa: T201 - to the user, as the table


def _client(handle: lp.Handle[ModelNode]) -> Any:
    return courier.with_timeout(handle.dereference(), 60.0)


def _follow(
    running: lp.RunningProgram, handle: lp.Handle[ModelNode], table: "Table | None"
) -> tuple[Result, Status]:
    """Shows the progress of a search; returns its results, and how it has ended."""
    node = _client(handle)
    try:
        while not running.join(0.0):
            try:
                status: Status = node.wait(_SHOW_S)
            except LOST:
                running.join(_SHOW_S)  # the model is started again, or the program ends
                continue
            except courier.CallCancelledError:
                # The program ends; or its job in Slurm has started again, with a new secret.
                if not running.join(_SHOW_S):
                    node = _client(handle)
                continue
            if table is not None:
                table.show(status)
            if status.is_over:
                return Result(node.trials(), node.model(), status.seconds), status
    finally:
        if table is not None:
            table.end()
    running.wait()  # raises why
    raise SearchError("the search was stopped before its end; with folder= the same call goes on")


class Table:
    """Shows how far a search is: one row, drawn again and again; in a pipe, a row every 10 s."""

    def __init__(self, total: int | None, out: TextIO | None = None) -> None:
        #: How many trials there will be, if that is known.
        self._total = total
        self._out = sys.stderr if out is None else out
        self._redraws = self._out.isatty()
        self._has_begun = False
        self._shown_at = time.monotonic()
        self._said: set[str] = set()

    def show(self, status: Status) -> None:
        """Shows it, if it is time for another row."""
        for kind in status.unknown_kinds:
            if kind not in self._said:
                self._said.add(kind)
                self._out.write(f"tasks of kind {kind!r} wait, and no worker takes them\n")
        is_last = self._has_begun and status.is_over
        if not self._redraws and time.monotonic() < self._shown_at + _ROW_S and not is_last:
            return
        self._shown_at = time.monotonic()
        if not self._has_begun:
            self._has_begun = True
            self._out.write(
                "".join(f"{name:>{_WIDTHS[name]}}" for name in _WIDTHS) + "      time\n"
            )
        row = self._row(status)
        self._out.write(f"\r{row}\x1b[K" if self._redraws else f"{row}\n")
        self._out.flush()

    def _row(self, status: Status) -> str:
        best = "" if status.best is None else f"{status.best.score:.5g}"
        cells = [
            f"{best if name == 'best' else getattr(status, name):>{width}}"
            for name, width in _WIDTHS.items()
        ]
        minutes, seconds = divmod(int(status.seconds), 60)
        row = "".join(cells) + f" {minutes // 60:3}:{minutes % 60:02}:{seconds:02}"
        if self._total:
            ended = status.done + status.failed + status.stopped
            filled = "█" * min(_BAR, _BAR * ended // self._total)
            row += f" [{filled:<{_BAR}}] {ended}/{self._total}"
        return row

    def end(self) -> None:
        """Leaves the last row where it is."""
        if self._redraws and self._has_begun:
            self._out.write("\n")
            self._out.flush()
