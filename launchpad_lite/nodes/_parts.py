"""Nodes that run as threads of another one, with a life of their own.

The program's life sees only the whole: it is constructed when all its parts are, checks for the
stop if all of them do, and fails as the first of them fails.
"""

import contextlib
import dataclasses
import logging
import queue
import time
from collections.abc import Sequence

import courier
from courier import lowlevel
from launchpad_lite.life import events
from launchpad_lite.life.policies import Liveness
from launchpad_lite.life.program_life import NodeTerms, ProgramLife
from launchpad_lite.life.result import WORK_DONE, ProgramResult
from launchpad_lite.life.timing import DEFAULT
from launchpad_lite.nodes.base import Work
from launchpad_lite.worker.runtime import NodeRuntime
from launchpad_lite.worker.threads import NodeThread, ThreadHost

#: Threads are ended by force in one step.
_TIMING = DEFAULT._replace(terminate_s=0.0)
#: Seconds in which the thread of the whole notices that it is ended by force.
_LOOK_S = 0.2

_LOGGER = logging.getLogger(__name__)


class _Part:
    """One part and its state."""

    def __init__(self, whole: "Parts", index: int, name: str, work: Work) -> None:
        outer = whole.outer
        setup = outer.setup._replace(
            # Liveness is checked for the whole process.
            liveness=Liveness(),
            checkpoints=outer.setup.checkpoints and outer.setup.checkpoints.of_part(index),
        )
        self.name = name
        self.work = work
        self.runtime = NodeRuntime(
            setup, outer.table, lambda said: whole.hear(self, said), has_process=outer.has_process
        )
        #: None until its object is there.
        self.runs: bool | None = None
        self.listens = False
        self.has_ended = False
        self.error: BaseException | None = None

    def run(self) -> None:
        """Runs it, in the current thread."""
        try:
            self.work(self.runtime)
        except BaseException as error:  # noqa: BLE001 - the thread of the whole raises it
            if self.runtime.leaves_in_order(error):
                self.runtime.note_cut_short(error)
            else:
                self.error = error
                # Code of the exception may block; the thread of the whole runs it with a limit.
                self.runtime.note_failed(courier.ExceptionReport.bare(error))


class Parts(ThreadHost):
    """The parts of one node, as threads of this process."""

    def __init__(self, outer: NodeRuntime, works: Sequence[tuple[str, Work]]) -> None:
        """Prepares them; `outer` is of the whole, and the names of works are for messages."""
        self.outer = outer
        #: From any thread; a SimpleQueue survives when a thread is ended by force in `put`.
        self._events: queue.SimpleQueue[events.Event] = queue.SimpleQueue()
        super().__init__(outer.setup.host, self._events.put, _TIMING.handlers_s)
        self._parts = {
            name: _Part(self, index, name, work) for index, (name, work) in enumerate(works)
        }
        self._life = ProgramLife(
            [NodeTerms(name, outer.setup.host) for name in self._parts],
            outer.setup.notice_s,
            timing=_TIMING,
            blame_s=0.0,  # the supervisor of the whole waits for a cause
            now=time.monotonic(),
            ends_when_idle=False,
        )
        self._at_work = contextlib.ExitStack()
        #: Parts that were ended by force, and whether their code ran then.
        self._forced: dict[str, bool] = {}

    def run(self, *, until_first: bool) -> None:
        """Runs all to their end, or to the first failure or, if wanted, the first end."""
        runtimes = [part.runtime for part in self._parts.values()]
        with self.outer.hosting(runtimes), self._at_work:
            try:
                result = self._supervise(until_first)
            except BaseException:
                # The whole is being ended by force: there is no time for requests.
                self._events.put(events.KillAsked())
                self._supervise(until_first)
                raise
            finally:
                self._tell_forced()
                self.close()
        for failure in result.cut_short:
            self.outer.say(events.CutShort, dataclasses.replace(failure, node=self.outer.name))
        self._raise_failure(result)

    def _supervise(self, until_first: bool) -> ProgramResult:
        event: events.Event = events.Tick()
        while True:
            for action in self._life.handle(event, time.monotonic()):
                if isinstance(action, events.Finish):
                    return action.result
                self.perform(action)
            if self._life.stopping:
                # Only now: a part whose call fails thereby knows already that it was asked to end.
                self.outer.clients.do(lowlevel.stop_waiting)
            self._note(event)
            if until_first and isinstance(event, events.Ended):
                self._events.put(events.StopAsked(WORK_DONE))
            try:
                event = self._events.get(timeout=_LOOK_S)
            except queue.Empty:
                event = events.Tick()

    def make(self, start: events.Start) -> NodeThread:
        """Returns the thread of a part."""
        part = self._parts[start.node]
        return NodeThread(part.runtime, part.run, f"{self.outer.name} {part.name}")

    def perform(self, action: events.NodeAction) -> None:
        """Does the actions on parts; clients from handles belong to the whole."""
        if isinstance(action, events.Tell) and action.method == "end_calls":
            self.outer.clients.do(lowlevel.stop_calling)
        elif isinstance(action, events.Terminate | events.Kill):
            if action.node in self._forced:
                return  # a second exception could hit the clean-up that the first one led to
            self._forced[action.node] = self.nodes[action.node].is_alive
            self.outer.clients.close(f"{self.outer.name} is ended by force")
        super().perform(action)

    def hear(self, part: _Part, said: events.Said) -> None:
        """Takes an event of a part, from any thread."""
        if isinstance(said, events.StopAsked):
            self.outer.ask_stop()
        elif isinstance(said, events.CutShort):
            self.outer.say(events.CutShort, said.failure)
        elif isinstance(said, events.Failed):
            failure = dataclasses.replace(said.failure, node=part.name)
            self._events.put(events.Failed(part.name, 0, failure))
        elif isinstance(said, events.Constructed | events.Leaving | events.StopReceived):
            self._events.put(dataclasses.replace(said, node=part.name, attempt=0))

    def _note(self, event: events.Event) -> None:
        """Reports changes of the whole after an event of a part."""
        parts = self._parts.values()
        if isinstance(event, events.Constructed):
            self._parts[event.node].runs = event.runs
        elif isinstance(event, events.Ended):
            self._parts[event.node].has_ended = True
        elif isinstance(event, events.StopReceived):
            self._parts[event.node].listens = event.listens
            if all(part.listens or part.has_ended for part in parts):
                self.outer.listen()
        if self._life.stopping:
            self._at_work.close()
        elif self.outer.runs is None:
            if all(part.runs is not None or part.has_ended for part in parts):
                runs = any(part.runs for part in parts)
                self._at_work.enter_context(self.outer.at_work(runs=runs))
        elif self.outer.runs and not all(part.has_ended for part in parts):
            # A part that runs may become one that serves, as a colocation in this one. A part that
            # leaves counts when it has ended: it may be about to say that it failed.
            if all(part.has_ended or not part.runs for part in parts):
                self.outer.constructed(runs=False)  # the program need not wait for these

    def _tell_forced(self) -> None:
        for name in (name for name, ran in self._forced.items() if ran):
            was_left = self.nodes[name].is_alive
            how = "could not be ended and was left behind" if was_left else "ended by force"
            _LOGGER.warning("%s: %s %s", self.outer.name, name, how)

    def _raise_failure(self, result: ProgramResult) -> None:
        """Raises the first error of a part, if there is one; also of those ended by force."""
        for name in (*(failure.node for failure in result.failures), *self._forced):
            if (error := self._parts[name].error) is not None:
                if hasattr(error, "add_note"):  # Python 3.11
                    error.add_note(f"in {name}, one of the nodes of {self.outer.name}")
                raise error
        if result.failures:
            raise RuntimeError(result.failures[0].summary)
