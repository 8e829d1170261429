"""The result of `launch`: a running program, with the methods of the original's `WorkerManager`."""

import contextlib
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import launchpad_lite as lp
from launchpad.stopping import (
    register_stop_handler,
    stop_event,
    unregister_stop_handler,
    wait_for_stop,
)

__all__ = [
    "WorkerManager",
    "register_stop_handler",
    "stop_all",
    "stop_event",
    "unregister_stop_handler",
    "wait_for_stop",
]

_LOOK_S = 0.05


class WorkerManager:
    """A launched program. Thread-safe."""

    def __init__(self, running: lp.RunningProgram, *, shares_memory: bool) -> None:
        #: The same program in launchpad-lite.
        self.running = running
        self._shares_memory = shares_memory
        #: Whether something other than the script ends it.
        self.is_taken = False
        _managers[:] = [each for each in _managers if each.running.result is None]
        _managers.append(self)

    def wait(
        self,
        labels_to_wait_for: Sequence[str] | None = None,
        raise_error: bool = True,
        return_on_first_completed: bool = False,
    ) -> None:
        """Waits until nodes have ended, or the program.

        Args:
            labels_to_wait_for: Their groups; None means all.
            raise_error: Whether a failure of any node is raised: its exception, if nodes are
                threads, otherwise a RuntimeError that names it. Raises as `RunningProgram.wait`
                where a signal ended the program.
            return_on_first_completed: Whether the end of one node is enough.
        """
        groups = {each.label for each in self.running.plan.executables}
        if missing := sorted(set(labels_to_wait_for or ()) - groups):
            raise ValueError(f"no group {missing[0]!r} to wait for; there are {sorted(groups)}")
        waited = groups if labels_to_wait_for is None else set(labels_to_wait_for)
        some = return_on_first_completed or waited < groups
        while not self.running.join(_LOOK_S if some else None):
            states = {node.name: node.state for node in self.running.status()}
            ended = [
                state == "ended"
                for name, state in states.items()
                if name.rpartition("[")[0] in waited
            ]
            is_enough = all(ended) or (return_on_first_completed and any(ended))
            if is_enough and "failed" not in states.values():
                return
        if raise_error:
            self._raise()

    def join(self) -> None:
        """Waits for the end of the program; raises as `wait`."""
        self.wait()

    def stop_and_wait(self) -> None:
        """Ends the program and waits for that. Does not raise failures."""
        self.running.request_stop("stop_and_wait() was called")
        self.wait(raise_error=False)
        self.running.collected = True

    def stop_event(self) -> threading.Event:
        """As `launchpad.stop_event`, for nodes."""
        return stop_event()

    def wait_for_stop(self, timeout_secs: float | None = None) -> bool:
        """As `launchpad.wait_for_stop`, for nodes."""
        return wait_for_stop(timeout_secs)

    def check_for_thread_worker_exception(self) -> None:
        """Raises as `wait`, if the program has failed."""
        if self.running.result is not None:
            self._raise()

    def cleanup_after_test(self, test_case: Any = None) -> None:  # noqa: ARG002 - raising fails it
        """Ends the program and waits for that; raises its failure, if that was not raised yet."""
        self.running.request_stop("its test has ended")
        self.running.join()
        if not self.running.collected:
            self._raise()

    def _raise(self) -> None:
        result = self.running.result
        assert result is not None
        report = result.failures[0].report if result.outcome is lp.Outcome.FAILED else None
        error = report.rebuild() if report is not None and self._shares_memory else None
        if error is None:
            self.running.wait()
        else:
            self.running.collected = True
            raise error from self.running.failure()


#: Launched programs that may still run. Scripts need not keep the result of `launch`.
_managers: list[WorkerManager] = []


def stop_all(reason: str) -> None:
    """Asks all programs that this process has launched to end."""
    for manager in _managers:
        manager.running.request_stop(reason)


def take_tests() -> list[WorkerManager]:
    """Returns programs of test types that are not taken yet; the caller ends them."""
    taken = [each for each in _managers if each.running.ends_with_script and not each.is_taken]
    for manager in taken:
        manager.is_taken = True
    return taken


def end_tests(managers: Iterable[WorkerManager] | None = None) -> None:
    """Ends programs, by default those of `take_tests`; raises what failed and was not raised yet."""
    with contextlib.ExitStack() as endings:  # of all, also if one raises
        for manager in take_tests() if managers is None else managers:
            endings.callback(manager.cleanup_after_test)
