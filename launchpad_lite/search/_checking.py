"""Checks, in a search of its own, that a worker does what docs/other_languages.md asks."""

import contextlib
import os
import signal
import subprocess
import time
import uuid
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import courier
import launchpad_lite as lp
from launchpad_lite.parts.joining import JOIN_FILE, JoinInfo
from launchpad_lite.search._messages import TaskState, TaskSubmission
from launchpad_lite.search._parts import RESTART, BrokerOptions, add_parts
from launchpad_lite.search._timing import Timing
from launchpad_lite.search.errors import LOST, SearchError


class Checks:
    """A search with one worker at a time. The options are those of the command line."""

    def __init__(self, options: Namespace, folder: Path) -> None:
        self._options, self._file = options, folder / JOIN_FILE
        kept = BrokerOptions(Timing(lease_s=3, beat_s=0.5, silence_s=3, poll_s=1), str(folder))
        program = lp.Program("check_worker")
        parts = add_parts(program, workers=0, brokers=1, label="check", options=kept)
        self._running = lp.launch(program, "local_mp", restart=RESTART)
        self._names: Any = parts.name_server.dereference()
        broker = parts.brokers["check_broker[0]"].dereference()
        self._broker: Any = courier.with_timeout(broker, options.patience_s)

    def run(self) -> bool:
        """Prints a line for each section of the page; returns whether no check has failed."""
        give, task = self._options, self._task
        long, large = give.long_payload, bytes(8 << 20)  # gRPC alone takes 4 MiB
        checks: list[tuple[Any, ...]] = [
            ("proof", "end if the server does not prove the secret", self._mislead),
            ("joining", "register, beat, and ask for tasks", self._join),
            ("tasks", "hand in outcomes with their tokens", task, give.payload, TaskState.DONE),
            ("failures", "hand in FAILED, and go on", task, give.bad_payload, TaskState.FAILED),
            ("sizes", "take replies of any size", task, large),
            ("leases", "name all that you have in heartbeats", task, long, TaskState.DONE),
            ("stops", "end what `stops` names", task, long, TaskState.STOPPED),
            ("restarts", "say Hello, and register again", task, long or give.payload, None, True),
            ("leaving", "leave and end at SIGTERM", self._leave),
            ("end", "leave when a reply has `is_over`", self._leave, self._names.close),
        ]
        with self._running:
            found = [self._is_fit(*each) for each in checks]
        return all(found)

    def _is_fit(self, name: str, asked: str, check: Callable[..., None], *needs: Any) -> bool:
        line = f"not checked  {name}: give another payload, see --help"
        try:
            if None not in needs[:1]:
                check(*needs)
                line = f"ok           {name}"
        except SearchError as error:
            line = (
                f"failed       {name}: {error}. It has to {asked}: docs/other_languages.md#{name}"
            )
            self._worker.kill()
            self._worker.wait()
        print(line, flush=True)  # noqa: T201 - what a command line is for
        return not line.startswith("failed")

    def _until(self, is_so: Callable[[], object], what: str) -> None:
        end_at = time.monotonic() + self._options.patience_s
        while not is_so():
            if (code := self._worker.poll()) is not None or time.monotonic() > end_at:
                raise SearchError(f"{what} (exit code: {code})")
            time.sleep(0.05)

    def _mislead(self) -> None:
        self._names.view()  # it is up
        other = JoinInfo(self._names.address, courier.Secret.generate())
        command = [*self._options.worker, other.write(self._file.parent / "other")]
        self._worker = subprocess.Popen(command, stdout=2)
        self._until(self._worker.poll, "it goes on, or has ended as if all were well")

    def _join(self) -> None:
        if self._worker.poll() is not None:
            self._broker.resume("check", ())  # it forgets tasks that are not done
            while self._names.view().workers or self._broker.load().workers:
                time.sleep(0.05)  # until one that was lost is forgotten
            self._worker = subprocess.Popen([*self._options.worker, self._file], stdout=2)
        self._until(lambda: self._names.view().workers, "it has not registered")
        self._until(lambda: self._broker.load().workers, "it has not asked for tasks")

    def _leave(self, ask: Callable[[], object] | None = None) -> None:
        self._join()
        (ask or self._worker.terminate)()
        self._until(lambda: self._worker.poll() == 0, "it has not ended in order")
        if ask is None and self._names.view().workers:
            raise SearchError("it has not called NameServer/Leave")

    def _task(self, payload: bytes, state: TaskState | None = None, kills: bool = False) -> None:
        self._join()
        task = TaskSubmission(uuid.uuid4().hex, payload, self._options.kind)
        victims = [each.pid for each in self._running.status() if each.pid and kills]
        found: list[Any] = []

        def has_come() -> list[Any]:
            with contextlib.suppress(*LOST):
                self._broker.submit("check", [task])  # again, for it may have been started again
                news = self._broker.collect("check", uuid.uuid4().hex, (), {}, 0.2)
                found.extend(each for each in news.outcomes if each.id == task.id)
                if news.load.running and state is TaskState.STOPPED:
                    self._broker.collect("check", "", (), {task.id: False}, 0.0)
                while news.load.running and victims:
                    os.kill(victims.pop(), signal.SIGKILL)
            return found

        self._until(has_come, "no outcome with its token has come")
        if found[0].lost_workers or state not in (None, found[0].state):
            losses = found[0].lost_workers
            raise SearchError(f"its task is {found[0].state.value}, after {losses} lost leases")
        self._join()  # it is there still, or again
