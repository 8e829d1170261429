"""The host agent: starts, watches and ends the workers of one program on one host.

A single thread with an event loop. Commands come in as frames on one
descriptor, events go out on another:

    in    survey, probe, relay, reserve, load_search, start, ping, quit, of relayed connections
          relay_*, and actions on nodes, of `launchpad_lite.life.events`
    out   surveyed, probed, relaying, reserved or unable, started or refused, output, stacks, exited,
          terminated, departing, alive, abandoned, relay_*, and events from workers, of the same module

The agent imports what workers share and forks them from itself, so a worker costs milliseconds. When its
input ends (the launcher is gone), or is silent for too long (the link is cut), the agent ends all workers
and itself. It ends no process that it did not start.
"""

import atexit
import collections
import contextlib
import gc
import math
import os
import resource
import select
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

# Imported here so that every forked worker has them.
from courier import Client, Server  # noqa: F401
from launchers.host.grant import Grant
from launchers.host.link import (
    MARKER,
    OVERSLEPT_S,
    SIGNS_PER_SILENCE,
    FrameDecoder,
    LinkFrame,
    SendBuffer,
    write_all,
)
from launchers.host.memory import count_memory_kills
from launchers.host.ports import PortReservations
from launchers.host.relay import RELAYED, Relay
from launchers.host.stacks import (
    STACKS_SIGNAL,
    has_stacks,
    last_calls,
    open_stacks,
    read_stacks,
    write_stacks_on_signal,
)
from launchers.host.sweep import (
    LIBC,
    adopt_orphans,
    end_children,
    fork_under_reaper,
    is_exiting,
    name_process,
    signal_all,
)
from launchers.host.usage import UsageMeter
from launchers.host.worker import leave, prepare_output, run_worker
from launchpad_lite.life.events import (
    DumpStacks,
    Kill,
    NodeAction,
    RequestStop,
    ServersLost,
    ServersMoved,
    Terminate,
    from_fields,
    to_fields,
)
from launchpad_lite.life.result import advice_on
from launchpad_lite.nodes.courier import CourierNode  # noqa: F401 - for workers
from launchpad_lite.parts.as_json import from_json
from launchpad_lite.parts.log_file import LogFile
from launchpad_lite.parts.marks import MARK
from launchpad_lite.parts.private_files import make_folder
from launchpad_lite.worker.address import Address

if TYPE_CHECKING:
    from launchers.host.probe import ProbeServer

#: Seconds from the request to end until SIGKILL, for workers whose launcher is gone.
_ORPHAN_NOTICE_S = 1.0
#: Most bytes of output that wait for a slow launcher; beyond that, only the log files get more.
_MAX_WAITING_BYTES = 16 << 20
#: How many waiting pieces of output are still sent of a node that was asked to end.
_LAST_PIECES = 8
#: Seconds that the reader of a pod's log has, at the end, to take the rest of the output.
_LOG_S = 2.0
_READ_BYTES = 1 << 16
#: Seconds that children of an ended worker have to end by themselves, and then until SIGKILL. A
#: tracker of shared memory ignores SIGTERM; it frees memory once others are gone.
_CHILDREN_S = 0.25
#: Seconds after which a signal asks for stacks again. A worker that runs Python answers sooner.
_ANSWER_S = 0.3
#: How much output a failure shows of a worker that died without a report.
_LAST_OUTPUT_BYTES = 8192
_LAST_OUTPUT_LINES = 50
#: Most reads of what a dead worker has left: together more than any pipe or socket holds.
_MAX_LAST_READS = 64
_PR_SET_PDEATHSIG = 1


@dataclass
class _WorkerProcess:
    """A worker. It may leave an incomplete checkpoint in the folder `checkpoints`."""

    name: str
    attempt: int
    pid: int
    control: socket.socket
    output_fd: int
    #: None where the launcher keeps its output.
    log: LogFile | None
    stacks_fd: int
    checkpoints: str | None
    #: Frames that wait to be sent, because a worker that is stopped or stuck reads nothing.
    outbox: SendBuffer
    decoder: FrameDecoder = field(default_factory=FrameDecoder)
    skipped_bytes: int = 0
    last_output: bytes = b""
    #: Exit code as of `subprocess`; None while it lives.
    status: int | None = None
    peak_mib: float = 0.0
    out_of_memory: bool = False
    #: Whether it was asked to end while it lived.
    asked: bool = False
    owes_stacks: bool = False
    #: When a signal asks for the stacks that it owes.
    signal_at: float = math.inf
    died_at: float = math.inf
    #: When its children get SIGTERM, or SIGKILL if they were asked to end, once it has ended.
    remove_at: float = math.inf
    children_asked: bool = False

    def close(self) -> None:
        self.control.close()
        if self.log is not None:
            self.log.close()
        for fd in (self.output_fd, self.stacks_fd):
            os.close(fd)


class _PodLog(SendBuffer):
    """Forwards the output of nodes to the output of their pod, without blocking the agent."""

    def __init__(self, fd: int) -> None:
        super().__init__(fd)
        self._skipped_bytes = 0
        self._room = select.poll()
        self._room.register(fd, select.POLLOUT)

    def _write(self, data: memoryview) -> int:
        # Other processes share the descriptor, so it stays in blocking mode. One that is ready takes at least as
        # many bytes as a pipe takes in one piece.
        if not self._room.poll(0):
            raise BlockingIOError
        return os.write(self.fd, data[: select.PIPE_BUF])

    def show(self, data: bytes) -> None:
        if len(self) > _MAX_WAITING_BYTES:
            self._skipped_bytes += len(data)
            return
        self._note_skipped()
        self.add(data)

    def _note_skipped(self) -> None:
        if self._skipped_bytes:
            note = f"\n[{self._skipped_bytes} bytes are missing: they came too fast for this log]\n"
            self._skipped_bytes = 0
            self.add(note.encode())

    def finish(self, give_up_at: float) -> None:
        self._note_skipped()
        while len(self) and (left_s := give_up_at - time.monotonic()) > 0:
            self._room.poll(1000 * left_s)
            self.flush()


class Agent:
    """The event loop and its state."""

    def __init__(
        self,
        input_fd: int,
        output_fd: int,
        launcher: int | None,
        silence_s: float = math.inf,
        *,
        in_pod: bool = False,
        shared_fds: Collection[int] = (),
    ) -> None:
        """Prepares the event loop.

        `launcher` is the launcher's process if it is on this machine. With `in_pod`, nodes and pod
        end together. `shared_fds` were open before, by start-up code of the interpreter; workers
        use them, too.
        """
        self._in_pod = in_pod
        self._pod_log = _PodLog(2) if in_pod else None
        self.exit_code = 0
        if in_pod:
            from launchers.host.pod import MAY_COME_BACK

            self.exit_code = MAY_COME_BACK  # unless it is asked to quit
        self._pid = os.getpid()
        self._silence_s = silence_s
        self._last_read_at = self._sent_at = time.monotonic()
        self._probe_server: ProbeServer | None = None
        self._usage = UsageMeter()
        self._relay: Relay | None = None
        self._input_fd = input_fd
        self._commands = FrameDecoder()
        self._out = SendBuffer(output_fd)
        #: Output of each node that waits to be sent, and reports that must come after it.
        self._waiting: dict[str, collections.deque[LinkFrame]] = {}
        self._waiting_bytes = 0
        #: How many bytes must have been sent before more output is put into the outbox.
        self._output_until = 0
        self._selector = selectors.DefaultSelector()
        self._workers: dict[str, _WorkerProcess] = {}
        self._ports = PortReservations()
        self._quitting = False
        #: Whether its pod was asked to end: nodes get their notice, and none is started any more.
        self._departing = False
        self._terminated_by = 0
        self._memory_kills = count_memory_kills()
        #: Workers whose processes were not waited for, so that the system cannot have reused their numbers.
        self._by_pid: dict[int, _WorkerProcess] = {}
        self._shared_fds = shared_fds
        #: When a worker must be checked again.
        self._due_at = math.inf
        if launcher is not None:
            self._watch_launcher(launcher)
        self._wake_read, self._wake_write = os.pipe()
        self._highest_fd = max(open_descriptors())
        for fd in (input_fd, output_fd, self._wake_read, self._wake_write):
            os.set_blocking(fd, False)
        self._watch(input_fd, self._on_input)
        self._watch(self._wake_read, self._on_wake)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # wakes the loop; an ignored signal does not
        # SIGTERM from outside (a terminal, a batch system): the launcher decides what to do.
        signal.signal(signal.SIGTERM, self._on_terminate)
        # A worker inherits the last of these until it has a handler: the signal must not end it.
        for signum in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE, STACKS_SIGNAL):
            signal.signal(signum, signal.SIG_IGN)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)

    def _watch_launcher(self, pid: int) -> None:
        """Notices the launcher's end even if a child of the launcher still holds the input open."""
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            self._quitting = True
        except (AttributeError, OSError):  # another system, an old kernel, or a sandbox
            pass
        else:
            self._watch(fd, lambda: self._on_launcher_end(fd))

    def _on_launcher_end(self, fd: int) -> None:
        self._quitting = True
        self._unwatch(fd)

    def run(self) -> None:
        """Works until it is asked to quit, or its launcher is gone."""
        try:
            while not self._quitting:
                began = time.monotonic()
                left_s = max(0.0, self._last_read_at + self._silence_s - began)
                # Often enough to notice that this process was stopped.
                wait_s = min(left_s, self._silence_s / SIGNS_PER_SILENCE)
                self._step(wait_s)
                if (late_s := time.monotonic() - began - wait_s) > OVERSLEPT_S:
                    # Processes on the way (ssh) slept as well, and may not have passed on messages yet.
                    self._last_read_at = min(self._last_read_at + late_s, time.monotonic())
                # Checked last, because messages that came while this machine slept have now been read.
                if time.monotonic() - self._last_read_at >= self._silence_s:
                    self._abandon(f"it got no message from here for {self._silence_s:g} s")
        finally:
            self._end_all()
            end_children()
            self._ports.close()
            if self._probe_server is not None:
                self._probe_server.close()
            if self._relay is not None:
                self._relay.close()
            self._out.flush()
            if self._pod_log is not None:
                self._pod_log.finish(time.monotonic() + _LOG_S)

    def _step(self, timeout_s: float) -> None:
        self._watch_for_room()
        timeout_s = min(timeout_s, max(0.0, self._due_at - time.monotonic()))
        for key, _ in self._selector.select(None if math.isinf(timeout_s) else timeout_s):
            # An earlier callback of this round may have closed this descriptor.
            if self._selector.get_map().get(key.fd) == key:
                key.data()
        if self._due_at <= time.monotonic():
            self._signal_silent()
            self._remove_ended()
            workers = self._workers.values()
            due = (min(each.remove_at, each.signal_at) for each in workers)
            self._due_at = min(due, default=math.inf)

    def _watch_for_room(self) -> None:
        """Watches the launcher's link and the pod's log for room, while data waits for them."""
        self._pass_output()
        for box in (self._out, self._pod_log):
            if box is None:
                continue
            watched = box.fd in self._selector.get_map()
            if len(box) and not watched:
                self._selector.register(box.fd, selectors.EVENT_WRITE, box.flush)
            elif watched and not len(box):
                self._selector.unregister(box.fd)

    # What comes in

    def _on_input(self) -> None:
        data = _read(self._input_fd)
        if data is None:
            return
        if not data:
            self._unwatch(self._input_fd)
            self._abandon("its end of the link was closed")
            return
        self._last_read_at = time.monotonic()
        for frame in self._commands.feed(data):
            self._obey(frame)
        if self._last_read_at - self._sent_at >= self._silence_s / SIGNS_PER_SILENCE:
            # The launcher's ping may wait behind much other data.
            self._tell_alive()

    def _abandon(self, why: str) -> None:
        """Ends all workers and itself, although the launcher did not ask for it."""
        # If this reaches the launcher, it must not count the ends of workers as successful.
        self._out.put(LinkFrame("abandoned", {"text": why}))
        self._quitting = True

    def _obey(self, frame: LinkFrame) -> None:
        questions: dict[str, Callable[[LinkFrame], LinkFrame]] = {
            "survey": self._survey,
            "probe": self._probe,
            "relay": self._listen_for,
            "reserve": self._reserve,
        }
        match frame.op:
            case op if op in questions:
                try:
                    answer = questions[op](frame)
                except OSError as error:  # a port is taken, or no file can be opened any more
                    answer = LinkFrame("unable", {"text": str(error)})
                self._out.put(answer)
            case op if op in RELAYED:
                self._relays().handle(frame)
            case "ping":
                self._tell_alive()
            case "load_search":  # while the launcher prepares the nodes
                with contextlib.suppress(Exception):  # a worker that cannot import it says so
                    from launchpad_lite.search.worker import load_parts

                    load_parts()
            case "start":
                self._start(frame)
            case "quit":
                self.exit_code = frame.fields.get("code", 0)
                self._quitting = True
            case op:
                self._perform(from_fields(op, frame.fields), frame)

    def _perform(self, action: NodeAction, frame: LinkFrame) -> None:
        """Carries out an action on nodes; forwards the frame if a worker carries it out."""
        if isinstance(action, ServersLost | ServersMoved):
            for each in self._workers.values():
                self._tell(each, frame)
            return
        worker = self._workers.get(action.node)
        if worker is None or worker.status is not None:
            return
        match action:
            case RequestStop():
                self._note_asked(worker)
                self._tell(worker, frame)
            case DumpStacks():
                if not worker.owes_stacks:  # the first stacks are nearest to the cause
                    self._tell(worker, frame)
                worker.owes_stacks = True
                # A stopped process reads nothing, so SIGCONT makes it continue.
                signal_all([worker.pid], signal.SIGCONT)
            case Terminate():
                self._note_asked(worker)
                if worker.owes_stacks:
                    worker.signal_at = self._due(_ANSWER_S)
                # The worker sends its group SIGTERM itself: it would handle one from here as a notice.
                self._tell(worker, frame)
            case Kill():
                self._note_asked(worker)
                if worker.status is None:  # its children are ended when it is removed
                    signal_all([worker.pid], signal.SIGKILL)
            case _:
                self._tell(worker, frame)

    def _survey(self, frame: LinkFrame) -> LinkFrame:
        from launchers.host.machine import Machine
        from launchers.host.probe import ProbeServer, candidate_addresses

        self._probe_server = ProbeServer(frame["word"])
        self._watch(self._probe_server.fileno(), self._probe_server.answer)
        self._ports = PortReservations("::")  # a probe decides which interface peers call
        found = {
            "machine": Machine.here()._asdict(),
            "addresses": candidate_addresses(),
            "port": self._probe_server.port,
        }
        return LinkFrame("surveyed", found)

    def _probe(self, frame: LinkFrame) -> LinkFrame:
        from launchers.host.probe import Target, reach

        targets = [Target(**each) for each in frame["targets"]]
        # This may block: the launcher waits for all hosts, so there is nothing else to do.
        reached = reach(targets, self._probe_server, frame["timeout_s"])
        # Messages that came meanwhile are not read yet.
        self._last_read_at = time.monotonic()
        return LinkFrame("probed", {"reached": reached})

    def _listen_for(self, frame: LinkFrame) -> LinkFrame:
        endpoint = self._relays().listen(frame["host"], frame["port"])
        return LinkFrame("relaying", {"endpoint": endpoint})

    def _relays(self) -> Relay:
        if self._relay is None:
            self._relay = Relay(self._selector, self._out.put)
        return self._relay

    def _tell_alive(self) -> None:
        self._sent_at = time.monotonic()
        living = {each.name: each.pid for each in self._workers.values() if each.status is None}
        self._out.put(LinkFrame("alive", {"usage": self._usage.look(living)}))

    def _reserve(self, frame: LinkFrame) -> LinkFrame:
        addresses = []
        for key, port, is_foreign, node in frame["addresses"]:
            address = Address(port=port, is_foreign=is_foreign)
            address.key, address.node = key, node
            addresses.append(address)
        reserved = self._ports.reserve_all(addresses)
        self._highest_fd = max(open_descriptors())
        return LinkFrame("reserved", {"ports": reserved})

    def _note_asked(self, worker: _WorkerProcess) -> None:
        """Notes that a worker is asked to end, unless it has already ended or failed by itself."""
        self._on_control(worker)
        if worker.status is None:
            self._note_death(worker, *os.wait4(worker.pid, os.WNOHANG))
        # A process that exits has closed its connections, and its callers know, before `wait` sees it.
        if worker.status is None and not is_exiting(worker.pid):
            worker.asked = True

    def _tell(self, worker: _WorkerProcess, frame: LinkFrame) -> None:
        worker.outbox.put(frame)
        self._watch_control(worker)

    def _watch_control(self, worker: _WorkerProcess) -> None:
        """Watches a worker for messages and, while frames wait for it, for room."""
        key = self._selector.get_map().get(worker.outbox.fd)
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if len(worker.outbox) else 0)
        if key is not None and key.events != events:
            self._selector.modify(key.fd, events, key.data)

    def _due(self, delay_s: float) -> float:
        """Returns the time after a delay; this loop wakes up by then."""
        at = time.monotonic() + delay_s
        self._due_at = min(self._due_at, at)
        return at

    def _signal_silent(self) -> None:
        for worker in self._workers.values():
            if worker.signal_at <= time.monotonic():
                worker.signal_at = math.inf
                if worker.status is None and not has_stacks(worker.stacks_fd):
                    signal_all([worker.pid], STACKS_SIGNAL)

    def _on_terminate(self, signum: int, stack: object) -> None:  # noqa: ARG002
        # This may interrupt anything, such as a write to the launcher, so `_on_wake` does the rest.
        self._terminated_by = signum

    # Workers

    def _start(self, frame: LinkFrame) -> None:
        if self._departing:
            return  # the node starts elsewhere, as soon as this end of the link is closed
        self._ports.lend(frame["node"])
        try:
            self._fork(frame)
        except OSError as error:  # no such folder, too many files, too many processes
            text = f"its process could not be started: {error}{advice_on(error)}"
            node, attempt = frame["node"], frame["attempt"]
            self._out.put(LinkFrame("refused", {"node": node, "attempt": attempt, "text": text}))

    def _fork(self, frame: LinkFrame) -> None:
        if frame["has_flags"]:
            import absl.flags  # noqa: F401 - once for all workers
        if self._workers:  # not before the first: the start of a program waits for it
            # Each worker may be asked what it does.
            import launchpad_lite.process.activity
            import launchpad_lite.worker.questions  # noqa: F401 - as above
            from courier import Pool  # noqa: F401 - as above
        with contextlib.ExitStack() as undo:
            log = None
            if frame["log"] is not None:
                path = Path(frame["log"])
                make_folder(path.parent)
                log = LogFile(path, frame["log_limit_bytes"])
                undo.callback(log.close)
            stacks_fd = open_stacks()
            undo.callback(os.close, stacks_fd)
            ours, theirs = map(undo.enter_context, socket.socketpair())
            output_read, output_write = os.pipe()
            undo.callback(os.close, output_read)
            undo.callback(os.close, output_write)
            newest = (stacks_fd, ours.fileno(), theirs.fileno(), output_read, output_write)
            self._highest_fd = max(self._highest_fd, *newest)
            # Blocked until the worker can handle SIGTERM as a notice.
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
            undo.callback(signal.pthread_sigmask, signal.SIG_UNBLOCK, {signal.SIGTERM})
            pid = os.fork()
            undo.pop_all()
        if pid == 0:
            self._become_worker(frame, theirs, output_write, stacks_fd)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        theirs.close()
        os.close(output_write)
        ours.setblocking(False)
        os.set_blocking(output_read, False)
        worker = _WorkerProcess(
            frame["node"],
            frame["attempt"],
            pid,
            ours,
            output_read,
            log,
            stacks_fd,
            frame.fields.get("checkpoints"),
            SendBuffer(ours.fileno()),
        )
        self._workers[worker.name] = self._by_pid[pid] = worker
        self._watch(ours.fileno(), lambda: self._on_control(worker))
        self._watch(output_read, lambda: self._on_output(worker))
        self._say(worker, "started", pid=pid)
        if note := frame.fields.get("note"):
            self._keep_output(worker, note.encode(errors="backslashreplace"))

    def _say(self, worker: _WorkerProcess, op: str, body: bytes = b"", **fields: Any) -> None:
        frame = LinkFrame(op, {**fields, "node": worker.name, "attempt": worker.attempt}, body)
        if op == "output" or (op in ("stacks", "exited") and worker.name in self._waiting):
            self._waiting.setdefault(worker.name, collections.deque()).append(frame)
            self._waiting_bytes += len(body)
            self._pass_output()
        else:
            self._out.put(frame)

    def _pass_output(self) -> None:
        """Sends output of nodes in turn, so that at most one piece of output delays an event."""
        while self._waiting and self._out.written >= self._output_until:
            node = next(iter(self._waiting))
            frames = self._waiting.pop(node)
            frame = frames.popleft()
            if frames:
                self._waiting[node] = frames
            self._waiting_bytes -= len(frame.body)
            self._out.put(frame)
            self._output_until = self._out.written + len(self._out)

    def _become_worker(
        self, frame: LinkFrame, control: socket.socket, out: int, stacks_fd: int
    ) -> NoReturn:
        code = 1
        try:
            os.setsid()
            _die_with_parent(self._pid)
            os.dup2(out, 1)
            os.dup2(out, 2)
            self._forget_all(control.fileno(), stacks_fd)
            _reset_interpreter()
            grant: Grant = from_json(Grant, frame["grant"])
            grant.apply()
            if grant.needs_interpreter:
                from launchers.host.interpreter import begin_anew

                begin_anew(grant.interpreter, frame.body, control.fileno(), stacks_fd)
            write_stacks_on_signal(stacks_fd)
            code = run_worker(frame.body, control.fileno(), stacks_fd)
        except BaseException:  # noqa: BLE001 - what it printed last is shown
            sys.excepthook(*sys.exc_info())
        finally:
            leave(code)

    def _forget_all(self, *kept: int) -> None:
        """Closes, in a forked worker, what belongs to the agent and to other workers."""
        # By number: to close each object would copy their memory, and more of it for each worker.
        signal.set_wakeup_fd(-1)
        if self._probe_server is not None:
            self._probe_server.close()
        if self._relay is not None:
            self._selector.close()
            self._relay.close()
        lowest = 3  # not 0, because `closerange(0, 0)` closes all
        for fd in sorted({*self._shared_fds, *kept} - {0, 1, 2}):
            os.closerange(lowest, fd)
            lowest = fd + 1
        os.closerange(lowest, self._highest_fd + 1)

    def _on_control(self, worker: _WorkerProcess) -> bool:
        """Handles messages of the worker; returns whether there may be more."""
        worker.outbox.flush()
        self._watch_control(worker)
        data = self._take(worker.control.fileno())
        for frame in worker.decoder.feed(data):
            if "unasked" in frame.fields:  # the worker itself does not know
                frame.fields["unasked"] = not worker.asked
            self._out.put(frame)
        return bool(data)

    def _on_output(self, worker: _WorkerProcess) -> bool:
        """Handles output of the worker; returns whether there may be more."""
        data = self._take(worker.output_fd)
        if data:
            self._keep_output(worker, data)
        return bool(data)

    def _take(self, fd: int) -> bytes:
        """Reads what is there; stops watching a descriptor that is at its end."""
        data = _read(fd)
        if data == b"":
            self._unwatch(fd)
        return data or b""

    def _watch(self, fd: int, do: Callable[[], object]) -> None:
        self._selector.register(fd, selectors.EVENT_READ, do)

    def _unwatch(self, fd: int) -> None:
        if fd in self._selector.get_map():
            self._selector.unregister(fd)

    def _keep_output(self, worker: _WorkerProcess, data: bytes) -> None:
        if worker.log is not None:
            with contextlib.suppress(OSError):  # a full disk must not end the program
                worker.log.write(data)
        if self._pod_log is not None:
            self._pod_log.show(data)
        worker.last_output = (worker.last_output + data)[-_LAST_OUTPUT_BYTES:]
        if self._waiting_bytes > _MAX_WAITING_BYTES:
            worker.skipped_bytes += len(data)
            return
        self._tell_skipped(worker)
        self._say(worker, "output", data)

    def _tell_skipped(self, worker: _WorkerProcess) -> None:
        if worker.skipped_bytes:
            lot = "are only in the log file" if worker.log is not None else "were lost"
            note = f"\n[{worker.skipped_bytes} bytes {lot}: they came too fast to be passed on]\n"
            worker.skipped_bytes = 0
            self._say(worker, "output", note.encode())

    def _on_wake(self) -> None:
        _read(self._wake_read)
        if self._terminated_by and self._in_pod:
            self._depart()
        elif self._terminated_by:
            self._out.put(LinkFrame("terminated", {"signum": self._terminated_by}))
        self._terminated_by = 0
        self._reap()

    def _depart(self) -> None:
        """Passes the notice of the pod on to its nodes, which end with it."""
        self._departing = True
        self._out.put(LinkFrame("departing"))
        for worker in self._workers.values():
            self._note_asked(worker)
        signal_all(self._by_pid, signal.SIGTERM)
        self._leave_if_departed()

    def _leave_if_departed(self) -> None:
        if self._departing and not self._workers:
            self._abandon("its pod was told to end")

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            # This includes orphans of workers, which the agent adopts.
            while (ended := os.wait4(-1, os.WNOHANG))[0]:
                if (worker := self._by_pid.get(ended[0])) is not None:
                    self._note_death(worker, *ended)
        self._remove_ended()

    def _note_death(
        self, worker: _WorkerProcess, pid: int, status: int, usage: resource.struct_rusage
    ) -> None:
        """Notes the result of `os.wait4` for a worker."""
        if pid:
            worker.status = os.waitstatus_to_exitcode(status)
            worker.peak_mib = usage.ru_maxrss / 1024
            if worker.status == -signal.SIGKILL and count_memory_kills() > self._memory_kills:
                self._memory_kills += 1  # each such end counts once
                worker.out_of_memory = True
            worker.died_at = time.monotonic()
            worker.remove_at = self._due(_CHILDREN_S)
            del self._by_pid[pid]

    def _remove_ended(self) -> None:
        now = time.monotonic()
        for worker in list(self._workers.values()):
            if worker.status is None:
                continue
            if _is_empty(worker.pid) or (worker.children_asked and now >= worker.remove_at):
                self._remove(worker)
            elif now >= worker.remove_at:
                worker.children_asked = True
                worker.remove_at = self._due(_CHILDREN_S)
                _signal_group(worker.pid, signal.SIGTERM)
        self._leave_if_departed()

    def _remove(self, worker: _WorkerProcess) -> None:
        if not _is_empty(worker.pid):
            # While the group has a member, the system cannot reuse its number.
            _signal_group(worker.pid, signal.SIGKILL)
        self._drain(worker)
        waiting = self._waiting.get(worker.name, collections.deque())
        while worker.asked and len(waiting) > _LAST_PIECES:
            worker.skipped_bytes += len(dropped := waiting.popleft().body)
            self._waiting_bytes -= len(dropped)
        self._tell_skipped(worker)
        del self._workers[worker.name]
        if worker.checkpoints:
            from launchpad_lite.worker.checkpoints import CheckpointStore

            CheckpointStore(Path(worker.checkpoints), 1).discard_incomplete()
        if stacks := read_stacks(worker.stacks_fd):
            self._say(worker, "stacks", stacks)
        lines = worker.last_output.splitlines(keepends=True)[-_LAST_OUTPUT_LINES:]
        self._say(
            worker,
            "exited",
            b"".join(lines) if worker.status else b"",
            status=worker.status,
            peak_mib=worker.peak_mib,
            out_of_memory=worker.out_of_memory,
            dead_s=time.monotonic() - worker.died_at,
            unasked=not worker.asked,
            calls=last_calls(worker.stacks_fd) if worker.status or worker.owes_stacks else [],
        )
        worker.close()

    def _drain(self, worker: _WorkerProcess) -> None:
        """Reads what a dead worker has left, and no more than that."""
        # A child that left the group may print forever.
        for _ in range(_MAX_LAST_READS):
            if not self._on_output(worker):
                break
        while self._on_control(worker):
            pass
        self._unwatch(worker.output_fd)
        self._unwatch(worker.control.fileno())

    def _end_all(self) -> None:
        for worker in self._workers.values():
            stop = RequestStop(worker.name, interrupts=True)
            self._tell(worker, LinkFrame(*to_fields(stop)))
        self._await_workers(_ORPHAN_NOTICE_S)
        signal_all(self._by_pid, signal.SIGKILL)
        self._await_workers(4 * _CHILDREN_S)

    def _await_workers(self, timeout_s: float) -> None:
        give_up_at = time.monotonic() + timeout_s
        while self._workers and (left := give_up_at - time.monotonic()) > 0:
            self._step(left)


def _read(fd: int) -> bytes | None:
    """Returns what is there, b"" at the end, None if there is nothing yet."""
    try:
        return os.read(fd, _READ_BYTES)
    except BlockingIOError:
        return None
    except OSError:
        return b""


def open_descriptors() -> set[int]:
    """Returns the numbers of this process's descriptors."""
    try:
        found = [int(each.name) for each in Path("/dev/fd").iterdir()]
    except OSError:  # a bare /dev
        found = [*range(resource.getrlimit(resource.RLIMIT_NOFILE)[0])]
    return set(filter(_is_open, found))  # without the descriptor of the listing, which is closed


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def _is_empty(pgid: int) -> bool:
    """Returns whether a process group has no members any more."""
    try:
        os.killpg(pgid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:  # some systems report this for zombies
        pass
    return False


def _signal_group(pgid: int, signum: int) -> None:
    # Some systems report PermissionError for a group that has only zombies.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pgid, signum)


def _die_with_parent(parent: int) -> None:
    """Makes the kernel end this worker with the agent, even if it cannot run Python code."""
    if sys.platform != "linux":
        return
    LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the agent ended before the call
        os._exit(1)


def _reset_interpreter() -> None:
    """Gives a forked worker the state of a fresh interpreter."""
    # SIGHUP stays ignored, because the launcher handles the end of a terminal. A SIGHUP to all would end
    # trackers of shared memory, which ignore other signals, before the processes whose memory they free.
    for signum in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(signum, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    atexit._clear()
    gc.enable()
    prepare_output()


def allow_many_files() -> None:
    """Raises the soft limit on open files, which exists for programs that use select."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    os.register_at_fork(
        after_in_child=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    )


def main(launcher: int | None, silence_s: float = math.inf, *, in_pod: bool = False) -> None:
    """Runs the agent's process, whose link is at standard input and output.

    On the launcher's machine, its process has a reaper already.
    """
    shared_fds = open_descriptors()
    if launcher is None:
        fork_under_reaper(os.environ[MARK])
    name_process("launchpad-agent", "launchpad agent")
    input_fd, output_fd = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.close(null)
    # Text that is printed here by mistake must not get into the link.
    os.dup2(2, 1)
    # Otherwise each forked worker would print again what a sitecustomize.py has printed.
    with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or none
        sys.stdout.flush()
    if launcher is not None:
        write_all(output_fd, MARKER)
    allow_many_files()
    adopt_orphans()
    # Workers share these pages with the agent, and keep them frozen: a collection would copy them.
    gc.freeze()
    gc.enable()
    agent = Agent(input_fd, output_fd, launcher, silence_s, in_pod=in_pod, shared_fds=shared_fds)
    agent.run()
    leave(agent.exit_code)
