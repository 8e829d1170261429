"""The host agent: starts, watches and ends the workers of one program on one host.

A single thread with an event loop. Commands come in as frames on one
descriptor, events go out on another:

    in    survey, probe, relay, reserve, start, stop, let_go, end_calls, ended, lost, moved, dump,
          look, terminate, kill, ping, quit, and of relayed connections relay_*
    out   surveyed, probed, relaying, reserved or taken, started or refused, output, stacks, exited,
          terminated, departing, alive, abandoned, relay_*, and what workers say: constructed, leaving,
          cut_short, looked, failing, failed, stop, stop_received, preempted, healthy, heartbeat

It imports what workers share and forks them from itself, so a worker costs
milliseconds. When its input ends (the launcher is gone, however), or is silent
for too long (the link is cut), it ends all workers and itself. It ends nothing
that it did not start.
"""

import atexit
import collections
import contextlib
import errno
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
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

# Imported here so that every forked worker has it.
import courier._engine.lane  # noqa: F401
from launchers._ports import PortReservations, PortTakenError
from launchers.host.grant import Grant
from launchers.host.link import (
    MARKER,
    OVERSLEPT_S,
    SIGNS_PER_SILENCE,
    Frame,
    FrameDecoder,
    Outbox,
    write_all,
)
from launchers.host.memory import count_memory_kills
from launchers.host.relay import RELAYED, Relay
from launchers.host.stacks import (
    STACKS_SIGNAL,
    has_stacks,
    open_stacks,
    read_stacks,
    write_stacks_on_signal,
)
from launchers.host.sweep import (
    LIBC,
    MARK,
    adopt_orphans,
    end_children,
    fork_under_warden,
    is_exiting,
)
from launchers.host.usage import UsageMeter
from launchers.host.worker import leave, prepare_output, run_worker
from launchpad_lite._address import Address
from launchpad_lite._log_file import LogFile
from launchpad_lite._private_files import make_folder
from launchpad_lite._result import advice_on

if TYPE_CHECKING:
    from launchers.host.probe import Doorbell

#: When the launcher is gone: seconds workers have between the request and the end by force.
_ORPHAN_NOTICE_S = 1.0
#: Output that waits for a slow launcher; beyond it, only the log files get more.
_MAX_WAITING_BYTES = 16 << 20
#: How many pieces of it the end of a node waits for that was asked to end.
_LAST_PIECES = 8
#: Seconds in which what is left of it is taken, at the end, by the reader of a pod's log.
_LOG_S = 2.0
_READ_BYTES = 1 << 16
#: Seconds that what a worker started has to end by itself when the worker has, and as many again
#: between SIGTERM and SIGKILL: a tracker of shared memory, which ignores SIGTERM, gives the memory
#: back when all others have gone.
_CHILDREN_S = 0.25
#: Seconds after which a worker that is being ended is asked once more where it is, by a signal: longer
#: than one takes to answer that runs Python code, and shorter than the time until SIGKILL.
_ANSWER_S = 0.3
#: How much of the output is shown of a worker that died without a report.
_LAST_OUTPUT_BYTES = 8192
_LAST_OUTPUT_LINES = 50
#: What may still be on its way from a dead worker: more than any pipe or socket holds.
_MAX_LAST_READS = 64
_PR_SET_PDEATHSIG = 1


@dataclass
class _Worker:
    name: str
    attempt: int
    pid: int
    control: socket.socket
    output_fd: int
    #: None where the launcher keeps its output.
    log: LogFile | None
    stacks_fd: int
    #: Where it may leave half a checkpoint.
    checkpoints: Path | None
    #: What is still to be sent to it: a worker that is stopped, or stuck, reads nothing.
    outbox: Outbox
    decoder: FrameDecoder = field(default_factory=FrameDecoder)
    skipped_bytes: int = 0
    last_output: bytes = b""
    #: As of `subprocess`; None while it lives.
    status: int | None = None
    peak_mib: float = 0.0
    out_of_memory: bool = False
    #: Whether it was asked to end while it lived.
    asked: bool = False
    #: Whether it was asked where its threads are; it may be stuck where it cannot answer.
    owes_stacks: bool = False
    #: When it is asked for that by a signal.
    signal_at: float = math.inf
    died_at: float = math.inf
    #: When what it started is ended, or ended by force, once it has ended itself.
    bury_at: float = math.inf
    #: Whether what it started got SIGTERM.
    children_asked: bool = False

    def close(self) -> None:
        self.control.close()
        if self.log is not None:
            self.log.close()
        for fd in (self.output_fd, self.stacks_fd):
            os.close(fd)


class _PodLog:
    """Output of nodes on its way to that of their pod, which must not hold up anybody.

    Its descriptor blocks: it is not the agent's alone. But what can be written to at all takes as
    much as a pipe takes in one piece.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._buffer = bytearray()
        self._skipped_bytes = 0
        self._room = select.poll()
        self._room.register(fd, select.POLLOUT)

    def __len__(self) -> int:
        return len(self._buffer)

    def put(self, data: bytes) -> None:
        """Adds output and writes what fits."""
        if len(self._buffer) > _MAX_WAITING_BYTES:
            self._skipped_bytes += len(data)
            return
        self._note_skipped()
        self._buffer += data
        self.flush()

    def _note_skipped(self) -> None:
        if self._skipped_bytes:
            note = f"\n[{self._skipped_bytes} bytes are missing: they came too fast for this log]\n"
            self._skipped_bytes = 0
            self._buffer += note.encode()

    def flush(self) -> None:
        """Writes what fits; drops everything if it cannot be written."""
        try:
            while self._buffer and self._room.poll(0):
                written = os.write(self.fd, memoryview(self._buffer)[: select.PIPE_BUF])
                del self._buffer[:written]
        except BlockingIOError:
            pass
        except OSError:  # a full disk must not end the program
            self._buffer.clear()

    def finish(self, give_up_at: float) -> None:
        """Writes what is left, as far as it is taken by then."""
        self._note_skipped()
        while self._buffer and (left_s := give_up_at - time.monotonic()) > 0:
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
    ) -> None:
        """Takes its place.

        Args:
            input_fd: Where commands come from.
            output_fd: Where events go.
            launcher: The launcher's process, if it is on this machine.
            silence_s: Seconds after which a launcher that says nothing is taken for gone.
            in_pod: Whether it is for the nodes of one pod: they and the pod end together, and what
                they print is the pod's output, too.
        """
        self._in_pod = in_pod
        self._pod_log = _PodLog(2) if in_pod else None
        #: How its process ends; unless it is asked to quit, it may be started again.
        self.exit_code = 0
        if in_pod:
            from launchers.host.pod import MAY_COME_BACK

            self.exit_code = MAY_COME_BACK
        self._pid = os.getpid()
        self._silence_s = silence_s
        self._last_read_at = self._sent_at = time.monotonic()
        self._doorbell: Doorbell | None = None
        self._usage = UsageMeter()
        self._relay: Relay | None = None
        self._input_fd = input_fd
        self._commands = FrameDecoder()
        self._out = Outbox(output_fd)
        #: Output of each node that waits, and what the node may be said to have done only after it.
        self._waiting: dict[str, collections.deque[Frame]] = {}
        self._waiting_bytes = 0
        #: How much must have been written before more output is put into the outbox.
        self._output_until = 0
        self._selector = selectors.DefaultSelector()
        self._workers: dict[str, _Worker] = {}
        self._ports = PortReservations()
        #: Addresses of servers that have ended, by the nodes that call them.
        self._ended: dict[str, list[str]] = {}
        self._quitting = False
        #: Whether its pod was asked to end: nodes get their notice, and none is started any more.
        self._departing = False
        self._terminated_by = 0
        self._memory_kills = count_memory_kills()
        self._launcher_fd = None if launcher is None else self._watch_launcher(launcher)
        self._wake_read, self._wake_write = os.pipe()
        for fd in (input_fd, output_fd, self._wake_read, self._wake_write):
            os.set_blocking(fd, False)
        self._selector.register(input_fd, selectors.EVENT_READ, self._on_input)
        self._selector.register(self._wake_read, selectors.EVENT_READ, self._on_wake)
        signal.signal(signal.SIGCHLD, _do_nothing)
        # Asked to end from outside (a terminal, a batch system): the launcher decides.
        signal.signal(signal.SIGTERM, self._on_terminate)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        # Inherited by a worker until it can do better: it must not die of it.
        signal.signal(STACKS_SIGNAL, signal.SIG_IGN)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)

    def _watch_launcher(self, pid: int) -> int | None:
        """Notices the launcher's end even if a child of its still holds the input open."""
        if not hasattr(os, "pidfd_open"):
            return None
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            self._quitting = True
            return None
        except OSError:  # an old kernel, or a sandbox
            return None
        self._selector.register(fd, selectors.EVENT_READ, self._on_launcher_end)
        return fd

    def _on_launcher_end(self) -> None:
        self._quitting = True
        assert self._launcher_fd is not None
        self._unwatch(self._launcher_fd)

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
                    # Those between, who slept as well, may not have passed on yet what was said.
                    self._last_read_at = min(self._last_read_at + late_s, time.monotonic())
                # Only now: what was sent while this machine slept has been read.
                if time.monotonic() - self._last_read_at >= self._silence_s:
                    self._abandon(f"it got no message from here for {self._silence_s:g} s")
        finally:
            self._end_all()
            end_children(os.getpid())
            self._ports.close()
            if self._doorbell is not None:
                self._doorbell.close()
            if self._relay is not None:
                self._relay.close()
            self._out.flush()
            if self._pod_log is not None:
                self._pod_log.finish(time.monotonic() + _LOG_S)

    def _step(self, timeout_s: float) -> None:
        self._watch_for_room()
        workers = self._workers.values()
        due = min((min(each.bury_at, each.signal_at) for each in workers), default=math.inf)
        timeout_s = min(timeout_s, max(0.0, due - time.monotonic()))
        for key, _ in self._selector.select(None if math.isinf(timeout_s) else timeout_s):
            # What came before it in this round may have closed it.
            if self._selector.get_map().get(key.fd) == key:
                key.data()
        if due <= time.monotonic():
            self._signal_the_mute()
            self._bury_the_dead()

    def _watch_for_room(self) -> None:
        """Wakes up when the launcher, or the pod's log, takes more, if there is more."""
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
            # A ping may wait behind much that is on its way here.
            self._tell_alive()

    def _abandon(self, why: str) -> None:
        """Ends all without having been asked to."""
        # If the launcher gets to know it, it must not take the ends of workers for good ones.
        self._out.put(Frame("abandoned", {"text": why}))
        self._quitting = True

    def _obey(self, frame: Frame) -> None:
        commands: dict[str, Callable[[Frame], None]] = {
            "survey": self._survey,
            "probe": self._probe,
            "relay": self._listen_for,
            **dict.fromkeys(RELAYED, self._on_relayed),
            "ping": self._ping,
            "moved": self._note_moved,
            "lost": self._note_lost,
            "reserve": self._reserve,
            "start": self._start,
            "stop": self._stop,
            "let_go": self._pass_on,
            "end_calls": self._pass_on,
            "ended": self._note_ended,
            "dump": self._dump,
            "look": self._pass_on,
            "terminate": self._terminate,
            "kill": self._kill,
            "quit": self._quit,
        }
        commands[frame.op](frame)

    def _survey(self, frame: Frame) -> None:
        """Reports what this machine has, and where others may reach it."""
        from launchers.host.machine import Machine
        from launchers.host.probe import Doorbell, candidate_addresses

        self._doorbell = Doorbell(frame["word"])
        self._selector.register(self._doorbell, selectors.EVENT_READ, self._doorbell.answer)
        self._ports = PortReservations(frame["listen_host"])
        found = {
            "machine": Machine.here().encode(),
            "addresses": candidate_addresses(),
            "port": self._doorbell.port,
            "time_s": time.time(),
        }
        self._out.put(Frame("surveyed", found))

    def _probe(self, frame: Frame) -> None:
        from launchers.host.probe import Target, reach

        targets = [
            Target(each["name"], tuple(each["addresses"]), each["port"], each["word"])
            for each in frame["targets"]
        ]
        # The launcher waits for all, so there is nothing else to do.
        reached = reach(targets, self._doorbell, frame["timeout_s"])
        self._out.put(Frame("probed", {"reached": reached}))
        # What was said meanwhile was not looked at yet.
        self._last_read_at = time.monotonic()

    def _listen_for(self, frame: Frame) -> None:
        """Opens ports that stand for those of a host which this one does not reach."""
        ports = self._relays().listen(frame["host"], frame["ports"])
        self._out.put(Frame("relaying", {"ports": ports}))

    def _on_relayed(self, frame: Frame) -> None:
        self._relays().handle(frame)

    def _relays(self) -> Relay:
        if self._relay is None:
            self._relay = Relay(self._selector, self._out.put)
        return self._relay

    def _ping(self, frame: Frame) -> None:  # noqa: ARG002 - all commands look alike
        self._tell_alive()

    def _tell_alive(self) -> None:
        self._sent_at = time.monotonic()
        living = {
            worker.name: worker.pid for worker in self._workers.values() if worker.status is None
        }
        self._out.put(Frame("alive", {"usage": self._usage.look(living)}))

    def _note_lost(self, frame: Frame) -> None:
        for worker in self._workers.values():
            self._tell(worker, "lost", keys=frame["keys"])

    def _note_moved(self, frame: Frame) -> None:
        for worker in self._workers.values():
            self._tell(worker, "moved", endpoints=frame["endpoints"])

    def _reserve(self, frame: Frame) -> None:
        addresses = []
        for key, port, is_foreign, node in frame["addresses"]:
            address = Address(port=port, is_foreign=is_foreign)
            address.key, address.node = key, node
            addresses.append(address)
        try:
            self._out.put(Frame("reserved", {"ports": self._ports.reserve_all(addresses)}))
        except PortTakenError as error:
            self._out.put(Frame("taken", {"text": str(error)}))

    def _stop(self, frame: Frame) -> None:
        if (worker := self._workers.get(frame["node"])) is not None:
            self._note_asked(worker)
            self._tell(worker, "stop", interrupts=frame["interrupts"])

    def _note_asked(self, worker: _Worker) -> None:
        """Takes note that a worker is asked to end, after all that it had done before."""
        self._on_control(worker)
        if worker.status is None:
            self._note_death(worker, *os.wait4(worker.pid, os.WNOHANG))
        # Its connections are closed, and its callers know, before it can be waited for.
        if worker.status is None and not is_exiting(worker.pid):
            worker.asked = True

    def _tell(self, worker: _Worker, op: str, **fields: Any) -> None:
        worker.outbox.put(Frame(op, fields))
        self._watch_control(worker)

    def _watch_control(self, worker: _Worker) -> None:
        """Wakes up when a worker says something and, if there is something, when it takes more."""
        key = self._selector.get_map().get(worker.outbox.fd)
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if len(worker.outbox) else 0)
        if key is not None and key.events != events:
            self._selector.modify(key.fd, events, key.data)

    def _pass_on(self, frame: Frame) -> None:
        if (worker := self._workers.get(frame["node"])) is not None:
            self._tell(worker, frame.op)

    def _note_ended(self, frame: Frame) -> None:
        for caller in frame["callers"]:
            self._ended.setdefault(caller, []).extend(frame["keys"])
            if (worker := self._workers.get(caller)) is not None:
                self._tell(worker, "ended", keys=frame["keys"])

    def _dump(self, frame: Frame) -> None:
        worker = self._living(frame)
        if worker is not None:
            if not worker.owes_stacks:  # what was written first is nearest to the cause
                self._tell(worker, "dump")
            worker.owes_stacks = True
            # A stopped process would receive nothing; it takes a signal before it continues.
            _signal(worker.pid, signal.SIGCONT)

    def _terminate(self, frame: Frame) -> None:
        worker = self._living(frame)
        if worker is not None:
            self._note_asked(worker)
            if worker.owes_stacks:
                worker.signal_at = time.monotonic() + _ANSWER_S
            # It sends its group SIGTERM itself: from here it would be taken for a notice.
            self._tell(worker, "leave")

    def _signal_the_mute(self) -> None:
        for worker in self._workers.values():
            if worker.signal_at <= time.monotonic():
                worker.signal_at = math.inf
                if worker.status is None and not has_stacks(worker.stacks_fd):
                    _signal(worker.pid, STACKS_SIGNAL)

    def _kill(self, frame: Frame) -> None:
        worker = self._living(frame)
        if worker is not None:
            self._note_asked(worker)
        if worker is not None and worker.status is None:
            # What it started follows when it is buried.
            _signal(worker.pid, signal.SIGKILL)

    def _living(self, frame: Frame) -> _Worker | None:
        worker = self._workers.get(frame["node"])
        return worker if worker is not None and worker.status is None else None

    def _quit(self, frame: Frame) -> None:
        self.exit_code = frame.fields.get("code", 0)
        self._quitting = True

    def _on_terminate(self, signum: int, stack: object) -> None:  # noqa: ARG002
        # Anything may be under way, a write to the launcher for one: `_on_wake` continues with it.
        self._terminated_by = signum

    # Workers

    def _start(self, frame: Frame) -> None:
        if self._departing:
            return  # it starts elsewhere, as soon as this end of the link is gone
        self._ports.lend(frame["node"])
        try:
            self._fork(frame)
        except OSError as error:  # no such folder, too many files, too many processes
            text = f"its process could not be started: {error}{advice_on(error)}"
            node, attempt = frame["node"], frame["attempt"]
            self._out.put(Frame("refused", {"node": node, "attempt": attempt, "text": text}))

    def _fork(self, frame: Frame) -> None:
        if frame["has_flags"]:
            import absl.flags  # noqa: F401 - once for all workers
        if b"launchpad_lite.search." in frame.body:
            import launchpad_lite.search  # noqa: F401 - as above
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
            # Until the worker can take it as a notice.
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
            undo.callback(signal.pthread_sigmask, signal.SIG_UNBLOCK, {signal.SIGTERM})
            pid = os.fork()
            undo.pop_all()
        if pid == 0:
            self._become_worker(frame, theirs, ours, output_write, log, stacks_fd)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        theirs.close()
        os.close(output_write)
        ours.setblocking(False)
        os.set_blocking(output_read, False)
        checkpoints = frame.fields.get("checkpoints")
        worker = _Worker(
            frame["node"],
            frame["attempt"],
            pid,
            ours,
            output_read,
            log,
            stacks_fd,
            Path(checkpoints) if checkpoints else None,
            Outbox(ours.fileno()),
        )
        self._workers[worker.name] = worker
        self._selector.register(
            ours.fileno(), selectors.EVENT_READ, lambda: self._on_control(worker)
        )
        self._selector.register(output_read, selectors.EVENT_READ, lambda: self._on_output(worker))
        if keys := self._ended.get(worker.name):
            self._tell(worker, "ended", keys=keys)
        self._say(worker, "started", {"pid": pid})
        if note := frame.fields.get("note"):
            self._keep_output(worker, note.encode(errors="backslashreplace"))

    def _say(
        self, worker: _Worker, op: str, fields: Mapping[str, Any] | None = None, body: bytes = b""
    ) -> None:
        """Passes on something about a worker."""
        about = {"node": worker.name, "attempt": worker.attempt}
        frame = Frame(op, {**(fields or {}), **about}, body)
        if op == "output" or (op in ("stacks", "exited") and worker.name in self._waiting):
            self._waiting.setdefault(worker.name, collections.deque()).append(frame)
            self._waiting_bytes += len(body)
            self._pass_output()
        else:
            self._out.put(frame)

    def _pass_output(self) -> None:
        """Passes output on, of one node after the other: one piece at most stands before events."""
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
        self,
        frame: Frame,
        control: socket.socket,
        other: socket.socket,
        out: int,
        log: LogFile | None,
        stacks_fd: int,
    ) -> NoReturn:
        code = 1
        try:
            os.setsid()
            _die_with_parent(self._pid)
            self._forget_all()
            other.close()
            if log is not None:
                log.close()
            os.dup2(out, 1)
            os.dup2(out, 2)
            os.close(out)
            _reset_interpreter()
            grant = Grant.decode(frame["grant"])
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

    def _forget_all(self) -> None:
        """In a forked worker: closes what belongs to the agent and to other workers."""
        signal.set_wakeup_fd(-1)
        self._selector.close()
        if self._launcher_fd is not None:
            os.close(self._launcher_fd)
        for fd in (self._input_fd, self._out.fd, self._wake_read, self._wake_write):
            os.close(fd)
        for worker in self._workers.values():
            worker.close()
        self._ports.close()
        if self._doorbell is not None:
            self._doorbell.close()
        if self._relay is not None:
            self._relay.close()

    def _on_control(self, worker: _Worker) -> bool:
        """Takes in what the worker says; returns whether there may be more."""
        worker.outbox.flush()
        self._watch_control(worker)
        data = self._take(worker.control.fileno())
        for frame in worker.decoder.feed(data):
            more = {"unasked": not worker.asked} if frame.op in ("failed", "leaving") else {}
            self._say(worker, frame.op, {**frame.fields, **more}, frame.body)
        return bool(data)

    def _on_output(self, worker: _Worker) -> bool:
        """Takes in what the worker prints; returns whether there may be more."""
        data = self._take(worker.output_fd)
        if data:
            self._keep_output(worker, data)
        return bool(data)

    def _take(self, fd: int) -> bytes:
        """Reads what is there, and watches the descriptor no longer if it is at its end."""
        data = _read(fd)
        if data == b"":
            self._unwatch(fd)
        return data or b""

    def _unwatch(self, fd: int) -> None:
        if fd in self._selector.get_map():
            self._selector.unregister(fd)

    def _keep_output(self, worker: _Worker, data: bytes) -> None:
        if worker.log is not None:
            with contextlib.suppress(OSError):  # a full disk must not end the program
                worker.log.write(data)
        if self._pod_log is not None:
            self._pod_log.put(data)
        worker.last_output = (worker.last_output + data)[-_LAST_OUTPUT_BYTES:]
        if self._waiting_bytes > _MAX_WAITING_BYTES:
            worker.skipped_bytes += len(data)
            return
        self._tell_skipped(worker)
        self._say(worker, "output", body=data)

    def _tell_skipped(self, worker: _Worker) -> None:
        if worker.skipped_bytes:
            lot = "are only in the log file" if worker.log is not None else "were lost"
            note = f"\n[{worker.skipped_bytes} bytes {lot}: they came too fast to be passed on]\n"
            worker.skipped_bytes = 0
            self._say(worker, "output", body=note.encode())

    def _on_wake(self) -> None:
        _read(self._wake_read)
        if self._terminated_by and self._in_pod:
            self._depart()
        elif self._terminated_by:
            self._out.put(Frame("terminated", {"signum": self._terminated_by}))
        self._terminated_by = 0
        self._reap()

    def _depart(self) -> None:
        """Passes a notice on: the pod goes with its nodes."""
        self._departing = True
        self._out.put(Frame("departing"))
        for worker in self._workers.values():
            self._note_asked(worker)
            if worker.status is None:
                _signal(worker.pid, signal.SIGTERM)
        self._leave_if_departed()

    def _leave_if_departed(self) -> None:
        if self._departing and not self._workers:
            self._abandon("its pod was told to end")

    def _reap(self) -> None:
        by_pid = {worker.pid: worker for worker in self._workers.values() if worker.status is None}
        with contextlib.suppress(ChildProcessError):
            # Orphans of workers, too: they become ours.
            while (ended := os.wait4(-1, os.WNOHANG))[0]:
                if (worker := by_pid.get(ended[0])) is not None:
                    self._note_death(worker, *ended)
        self._bury_the_dead()

    def _note_death(
        self, worker: _Worker, pid: int, status: int, usage: resource.struct_rusage
    ) -> None:
        """Takes in what `os.wait4` says of a worker."""
        if pid:
            worker.status = os.waitstatus_to_exitcode(status)
            worker.peak_mib = usage.ru_maxrss / 1024
            worker.out_of_memory = self._was_memory_kill(worker.status)
            worker.died_at = time.monotonic()
            worker.bury_at = worker.died_at + _CHILDREN_S

    def _was_memory_kill(self, status: int) -> bool:
        """Returns whether the kernel ended a worker, once for each that it did."""
        if status != -signal.SIGKILL or count_memory_kills() <= self._memory_kills:
            return False
        self._memory_kills += 1
        return True

    def _bury_the_dead(self) -> None:
        now = time.monotonic()
        for worker in list(self._workers.values()):
            if worker.status is None:
                continue
            if _is_empty(worker.pid) or (worker.children_asked and now >= worker.bury_at):
                self._bury(worker)
            elif now >= worker.bury_at:
                worker.children_asked = True
                worker.bury_at = now + _CHILDREN_S
                _signal_group(worker.pid, signal.SIGTERM)
        self._leave_if_departed()

    def _bury(self, worker: _Worker) -> None:
        if not _is_empty(worker.pid):
            # As long as anybody is in it, the group's number cannot be anybody else's.
            _signal_group(worker.pid, signal.SIGKILL)
        self._drain(worker)
        waiting = self._waiting.get(worker.name, collections.deque())
        while worker.asked and len(waiting) > _LAST_PIECES:
            worker.skipped_bytes += len(dropped := waiting.popleft().body)
            self._waiting_bytes -= len(dropped)
        self._tell_skipped(worker)
        del self._workers[worker.name]
        if worker.checkpoints is not None:
            from launchpad_lite._checkpoints import CheckpointStore

            CheckpointStore(worker.checkpoints, 1).discard_incomplete()
        if stacks := read_stacks(worker.stacks_fd):
            self._say(worker, "stacks", body=stacks)
        how = {
            "status": worker.status,
            "peak_mib": worker.peak_mib,
            "out_of_memory": worker.out_of_memory,
            "dead_s": time.monotonic() - worker.died_at,
            "unasked": not worker.asked,
        }
        lines = worker.last_output.splitlines(keepends=True)[-_LAST_OUTPUT_LINES:]
        self._say(worker, "exited", how, b"".join(lines) if worker.status else b"")
        worker.close()

    def _drain(self, worker: _Worker) -> None:
        """Takes in what a dead worker still had to say, and no more than that."""
        # A child that left the group may go on printing for ever.
        for _ in range(_MAX_LAST_READS):
            if not self._on_output(worker):
                break
        while self._on_control(worker):
            pass
        self._unwatch(worker.output_fd)
        self._unwatch(worker.control.fileno())

    def _end_all(self) -> None:
        for worker in self._workers.values():
            self._tell(worker, "stop", interrupts=True)
        self._await_workers(_ORPHAN_NOTICE_S)
        for worker in self._workers.values():
            if worker.status is None:
                _signal(worker.pid, signal.SIGKILL)
        self._await_workers(4 * _CHILDREN_S)

    def _await_workers(self, timeout_s: float) -> None:
        give_up_at = time.monotonic() + timeout_s
        while self._workers and (left := give_up_at - time.monotonic()) > 0:
            self._step(left)


def _do_nothing(signum: int, stack: object) -> None:
    """Makes SIGCHLD wake the event loop: an ignored signal does not."""


def _read(fd: int) -> bytes | None:
    """Returns what is there, b"" at the end, None if there is nothing yet."""
    try:
        return os.read(fd, _READ_BYTES)
    except BlockingIOError:
        return None
    except OSError:
        return b""


def _is_empty(pgid: int) -> bool:
    """Returns whether a process group has no members any more."""
    try:
        os.killpg(pgid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:  # some systems say so of zombies
        pass
    return False


def _signal(pid: int, signum: int) -> None:
    """Signals a worker that was not waited for, so that its number is its own."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signum)


def _signal_group(pgid: int, signum: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        try:
            os.killpg(pgid, signum)
        except PermissionError as error:
            if error.errno != errno.EPERM:  # zombies only, as some systems say it
                raise


def _die_with_parent(parent: int) -> None:
    """Second belt, for workers that cannot run Python code: the kernel ends them."""
    if sys.platform != "linux":
        return
    LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the belt was on
        os._exit(1)


def _reset_interpreter() -> None:
    """In a forked worker: what a fresh interpreter would have."""
    # SIGHUP stays ignored: the end of a terminal is for the launcher. Sent to all, it would end the
    # trackers of shared memory, which ignore other signals, before those whose memory they return.
    for signum in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(signum, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    atexit._clear()
    gc.unfreeze()
    gc.enable()
    prepare_output()


def _allow_many_files() -> None:
    """Each worker holds some files of ours open; the soft limit is for programs that use select."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    os.register_at_fork(
        after_in_child=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    )


def main(launcher: int | None, silence_s: float = math.inf, *, in_pod: bool = False) -> None:
    """The agent's process: its link is where standard input and output were.

    Args:
        launcher: Process without which there is nothing to do, if it is on this machine.
        silence_s: Seconds after which a launcher that says nothing is taken for gone.
        in_pod: Whether it is for the nodes of one pod, and ends with it.
    """
    fork_under_warden(os.environ[MARK])
    input_fd, output_fd = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.close(null)
    # What anybody prints here by mistake must not get into the link.
    os.dup2(2, 1)
    # Each forked worker would print what a sitecustomize.py has printed.
    with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or none
        sys.stdout.flush()
    if launcher is not None:
        write_all(output_fd, MARKER)
    _allow_many_files()
    adopt_orphans()
    # Workers share these pages with the agent; a collection would copy them.
    gc.freeze()
    gc.enable()
    agent = Agent(input_fd, output_fd, launcher, silence_s, in_pod=in_pod)
    agent.run()
    leave(agent.exit_code)
