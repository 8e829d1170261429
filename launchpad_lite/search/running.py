"""A search as a program of its own, or as a part of one."""

import os
import sys
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import courier
import launchpad_lite as lp
from launchpad_lite._private_files import open_private
from launchpad_lite.search._broker import Broker, BrokerOptions
from launchpad_lite.search._helping import LOST
from launchpad_lite.search._messages import Life, member_here
from launchpad_lite.search._model_node import ModelNode, Status
from launchpad_lite.search._name_server import NameServer, make_name_server
from launchpad_lite.search._postgres import held_database
from launchpad_lite.search._presence import Presence
from launchpad_lite.search._progress import Table
from launchpad_lite.search._resuming import begin
from launchpad_lite.search._store import check_files
from launchpad_lite.search._timing import DEFAULT, Timing
from launchpad_lite.search._worker import Worker
from launchpad_lite.search.errors import SearchError
from launchpad_lite.search.models import Callback, Model
from launchpad_lite.search.results import Result

__all__ = ["add_to", "run"]

#: Seconds between two rows of the table.
_SHOW_S = 0.5
#: Nodes that are lost come back.
RESTART = lp.RestartPolicy("on_failure", max_restarts=1000, max_backoff_s=1.0)
#: Seconds that brokers of an earlier call have to end.
RELEASE_S = 5.0
#: Larger results fail.
MAX_RESULT_BYTES = 256 << 20


class WorkerNode:
    """A worker as a node of a program."""

    def __init__(
        self,
        name_server: Any,
        brokers: Mapping[str, Any],
        timing: Timing,
        max_result_bytes: int,
    ) -> None:
        """Makes one.

        Args:
            name_server: A client of it.
            brokers: Clients by name.
            timing: Of the search.
            max_result_bytes: Larger results fail.
        """
        who = Life(lp.current_node().name, uuid.uuid4().hex)
        member = member_here("worker", who)
        presence = Presence(member, name_server, brokers, courier.Client, timing)
        self._worker = Worker(presence, timing, lp.stop_event(), max_result_bytes, lp.heartbeat)

    def run(self) -> None:
        """Works until the search is over, or the program stops.

        Raises:
            SearchError: Nobody answers any more.
        """
        lp.register_stop_handler(self._worker.wake)
        try:
            self._worker.run()
        finally:
            lp.unregister_stop_handler(self._worker.wake)


@dataclass(frozen=True)
class Parts:
    """Handles of what models need.

    Attributes:
        name_server: Of the name server.
        brokers: Of the brokers, by name.
    """

    name_server: lp.Handle[NameServer]
    brokers: Mapping[str, lp.Handle[Broker]]


def add_parts(
    program: lp.Program,
    *,
    workers: int,
    brokers: int,
    label: str,
    options: BrokerOptions,
) -> Parts:
    """Adds a name server, brokers and workers to a program.

    Raises:
        ValueError: A number is too small, or the program has such a group.
    """
    least = 0 if options.folder else 1  # others join by a file there
    if workers < least or brokers < 1:
        raise ValueError(
            f"a search has at least 1 broker and {least} workers, not {brokers} and {workers}; with folder=, "
            "all workers may come from outside"
        )
    groups = {part: f"{label}_{part}" for part in ("name_server", "broker", "worker")}
    if taken := [group for group in groups.values() if group in program.groups]:
        raise ValueError(f"the program has a group {taken[0]!r}; give another label=")
    names = lp.CourierNode(make_name_server)
    names.configure(names.create_handle(), options.timing, options.folder)
    name_server = program.add_node(names, label=groups["name_server"])
    nodes = [lp.CourierNode(Broker) for _ in range(brokers)]
    handles = {
        f"{groups['broker']}[{index}]": node.create_handle() for index, node in enumerate(nodes)
    }
    with program.group(groups["broker"]):
        for name, node in zip(handles, nodes, strict=True):
            peers = {other: handle for other, handle in handles.items() if other != name}
            node.configure(handles[name], name_server, peers, options)
            program.add_node(node)
    with program.group(groups["worker"]):
        for _ in range(workers):
            program.add_node(
                lp.PyClassNode(WorkerNode, name_server, handles, options.timing, MAX_RESULT_BYTES)
            )
    return Parts(name_server, handles)


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
    """Adds a search to a program; returns a handle, by which other nodes see how far it is.

    Its nodes end when the search is over. Launch with `restart=` for the groups `<label>_worker`,
    `<label>_broker` and `<label>_name_server`, so that those which are lost come back, and with
    `checkpoints=` for `<label>_model`, so that the search goes on where it was.

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
        stays=False,
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
    stays: bool,
    callbacks: Sequence[Callback],
    anyway: bool = False,
) -> lp.Handle[ModelNode]:
    if not isinstance(model, Model):
        raise TypeError(f"a search takes a search.Model, not {model!r}")
    if model.needs_folder and options.folder is None:
        who = type(model).__name__
        raise ValueError(f"{who} needs folder=: its trials go on from the folders of others")
    if ahead is not None and ahead < 1:
        raise ValueError(f"at least 1 task is outstanding at a time (ahead), not {ahead}")
    parts = add_parts(
        program,
        workers=workers,
        brokers=brokers,
        label=label,
        options=options,
    )
    node = lp.CourierNode(
        ModelNode,
        model,
        parts.name_server,
        parts.brokers,
        options.timing,
        ahead,
        stays,
        anyway,
        options.folder,
        callbacks,
    )
    return program.add_node(node, label=f"{label}_model")


def run(
    model: Model,
    *,
    workers: int | None = None,
    brokers: int = 1,
    launcher: str = "local_mp",
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
    """Runs a search, and returns what it has found.

    Ctrl-C stops it in order. With a folder, the same call goes on where it was, with the newest code of
    the script; or on to more trials.

    Args:
        model: Decides what is tried. It runs in a node; what it has become is in the result.
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
            `"same"`: that is an error. `"anyway"`: to go on with it, for so many trials in all; what the
            model had learnt is kept if the algorithm is the same.
        callbacks: As for `add_to`.
        **launch_options: As for `lp.launch`: `resources`, `hosts`, `restart`, ..

    Raises:
        SearchError: It was stopped before its end, the first 10 trials or all of them have failed, or the
            folder has another search.
        NodeFailedError: The model, a broker or a worker has failed for good.
        StoreInUseError: Another search uses the folder or the database.
        StoreError: What brokers have kept there is damaged.
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
    running: lp.RunningProgram, handle: lp.Handle[ModelNode], table: Table | None
) -> tuple[Result, Status]:
    """Shows how far a search is; returns what it has found, and how it has ended."""
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
