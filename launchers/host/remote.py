"""The launcher's side of a host: starts its agent and speaks with it."""

import contextlib
import dataclasses
import logging
import os
import pickle
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launchers._console import Console
from launchers._supervisor import SupervisedProgram
from launchers.host.grant import Grant
from launchers.host.link import Frame, read_frames, write_all
from launchers.host.sweep import MARK, end_marked
from launchers.host.worker import Payload
from launchpad_lite._events import (
    Constructed,
    Ended,
    Failed,
    Healthy,
    Heard,
    Heartbeat,
    HostLost,
    Leaving,
    NodeEvent,
    Preempted,
    StopAsked,
)
from launchpad_lite.errors import LaunchError
from launchpad_lite.launching import Address, NodeFailure

if TYPE_CHECKING:
    from courier import ExceptionReport

_LOGGER = logging.getLogger(__name__)

_QUIT_S = 5.0
# With -c, the working directory stands in sys.path: nothing but built-in modules may be imported
# before it is gone, or a json.py of the user's would be. What follows takes its time, and a launcher
# that has gone by now wants nothing of it.
_BOOT = """\
import sys
sys.path[:] = eval(sys.argv.pop())
launcher = int(sys.argv.pop())
import os
if os.getppid() != launcher:
    sys.exit()
from launchers.host.agent import main
main(launcher)
"""


class AgentHost:
    """One host with its agent. Implements `launchers._supervisor.Host`."""

    def __init__(self, name: str, console: Console | None) -> None:
        """Starts the agent; it comes up while the caller goes on.

        Raises:
            LaunchError: It cannot be started.
        """
        self.name = name
        self._console = console
        self._mark = uuid.uuid4().hex
        self._payloads: Mapping[str, Payload] = {}
        self._grants: Mapping[str, Grant] = {}
        self._log_dir = Path()
        self._pids: dict[str, int] = {}
        self._failures: dict[str, NodeFailure] = {}
        self._stacks: dict[str, str] = {}
        self._closing = False
        self._process = self._start_agent()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._to_agent = self._process.stdin.fileno()
        self._from_agent = read_frames(self._process.stdout.fileno())
        self._reader: threading.Thread | None = None

    def _start_agent(self) -> subprocess.Popen[bytes]:
        flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        path = repr([str(folder) for folder in sys.path])
        command = [sys.executable, *flags, "-c", _BOOT, str(os.getpid()), path]
        try:
            return subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, MARK: self._mark},
                # Ctrl-C in the terminal is for the launcher, which stops the program in order.
                start_new_session=True,
                bufsize=0,
            )
        except OSError as error:
            raise LaunchError(f"cannot start the agent of {self.name}: {error}") from error

    def reserve(self, addresses: Sequence[Address]) -> dict[str, int]:
        """Has the agent hold a port for each address; returns them by address key.

        Raises:
            LaunchError: A port is taken, or the agent did not come up. The host is closed then.
        """
        wanted = [[each.key, each.port, each.is_foreign] for each in addresses]
        self._send(Frame("reserve", {"addresses": wanted}))
        answer = next(self._from_agent, None)
        if answer is not None and answer.op == "reserved":
            ports: dict[str, int] = answer["ports"]
            return ports
        self.close()
        if answer is None:
            raise LaunchError(
                f"the agent of {self.name} ended at once with exit code "
                f"{self._process.returncode}; its message is above"
            )
        raise LaunchError(str(answer["text"]))

    def listen(
        self,
        program: SupervisedProgram,
        payloads: Mapping[str, Payload],
        grants: Mapping[str, Grant],
        log_dir: Path,
    ) -> None:
        """Passes on, from now on, what the agent says.

        Args:
            program: Whom to tell.
            payloads: What the worker of each node must know, at its first start.
            grants: What it gets of the host.
            log_dir: Folder on the host for the output of nodes: `<label>/<replica>.log`.
        """
        self._payloads = payloads
        self._grants = grants
        self._log_dir = log_dir
        self._reader = threading.Thread(
            target=self._pass_on, args=(program,), name=f"launchpad-link-{self.name}", daemon=True
        )
        self._reader.start()

    def _send(self, frame: Frame) -> None:
        # An agent that is gone cannot be told; the reader sees that it is.
        write_all(self._to_agent, frame.encode())

    def _pass_on(self, program: SupervisedProgram) -> None:
        reason = f"the agent of {self.name} died"
        try:
            for frame in self._from_agent:
                self._take_in(frame, program)
        except Exception as error:
            # A mistake of ours must not become a wait without end.
            _LOGGER.exception("the link to %s failed", self.name)
            reason = f"the link to {self.name} failed: {error!r}"
        if not self._closing:
            lost = tuple(each.name for each in program.plan.executables)
            program.post(HostLost(self.name, lost, reason))

    def _take_in(self, frame: Frame, program: SupervisedProgram) -> None:
        if frame.op == "terminated":
            program.post(StopAsked(f"the agent of {self.name} got a signal", frame["signum"]))
            return
        node: str = frame["node"]
        if frame.op == "output":
            if self._console is not None:
                self._console.show(node, frame.body)
        elif frame.op == "started":
            self._pids[node] = frame["pid"]
            self._stacks.pop(node, None)
        elif frame.op == "stop":
            program.post(StopAsked(f"lp.stop() in {node}"))
        elif frame.op == "failed":
            report: ExceptionReport = pickle.loads(frame.body)
            failure = NodeFailure.of_exception(node, self.name, report)
            if (limit := self._grants[node].ram_bytes) and "MemoryError" in report.type_name:
                asked = f"it asked for ram_gib={limit / (1 << 30):g}, and may have no more"
                failure = dataclasses.replace(failure, summary=f"{failure.summary} ({asked})")
            self._failures[node] = failure
            program.post(Failed(node, frame["attempt"], failure))
        elif frame.op == "stacks":
            self._stacks[node] = frame.body.decode(errors="replace")
        else:
            program.post(self._event(node, frame))

    def _event(self, node: str, frame: Frame) -> NodeEvent:
        attempt: int = frame["attempt"]
        if frame.op == "constructed":
            return Constructed(node, attempt, frame["runs"])
        if frame.op == "leaving":
            return Leaving(node, attempt)
        if frame.op == "heard":
            return Heard(node, attempt, frame["listens"])
        if frame.op == "preempted":
            return Preempted(node, attempt, frame["signum"])
        if frame.op == "healthy":
            return Healthy(node, attempt)
        if frame.op == "heartbeat":
            return Heartbeat(node, attempt)
        if frame.op == "refused":
            return Ended(node, attempt, NodeFailure(node, self.name, str(frame["text"])))
        if frame.op == "exited":
            return Ended(node, attempt, self._failure(node, frame), self._stacks.get(node, ""))
        raise ValueError(f"the agent said {frame.op!r}")

    def _failure(self, node: str, frame: Frame) -> NodeFailure | None:
        """Returns how a worker failed that has exited; None if it did not."""
        if self._console is not None:
            self._console.finish(node)
        failure = self._failures.pop(node, None)
        if failure is not None or frame["status"] == 0:
            return failure
        return NodeFailure.of_exit(
            node,
            self.name,
            frame["status"],
            last_output=frame.body.decode(errors="replace"),
            peak_mib=frame["peak_mib"],
            out_of_memory=frame["out_of_memory"],
        )

    # What the supervisor asks for

    def start(self, node: str, attempt: int, cause: NodeFailure | None) -> None:
        """Starts a worker; its output begins with why it is started anew, if it is."""
        payload = self._payloads[node]
        setup = dataclasses.replace(payload.setup, attempt=attempt)
        log = self._log_dir / setup.label / f"{setup.replica}.log"
        fields: dict[str, Any] = {"node": node, "attempt": attempt, "log": str(log)}
        fields["grant"] = self._grants[node].encode()
        if attempt:
            why = "it is always restarted" if cause is None else cause.summary
            fields["note"] = f"[restart {attempt}: {why}]\n"
        if setup.checkpoints is not None:
            fields["checkpoints"] = str(setup.checkpoints.folder)
        body = dataclasses.replace(payload, setup=setup).encode()
        self._send(Frame("start", fields, body))

    def request_stop(self, node: str) -> None:
        """Tells a node to end."""
        self._send(Frame("stop", {"node": node}))

    def end_calls(self, node: str) -> None:
        """Has new calls of a node refused, unless it looks at the stop by now."""
        self._send(Frame("end_calls", {"node": node}))

    def tell_ended(self, callers: Sequence[str], endpoints: Sequence[str]) -> None:
        """Tells workers, later ones too, that nobody will answer at these any more."""
        self._send(Frame("ended", {"callers": list(callers), "endpoints": list(endpoints)}))

    def dump_stacks(self, node: str) -> None:
        """Has a worker write down where its threads are."""
        self._send(Frame("dump", {"node": node}))

    def terminate(self, node: str) -> None:
        """Sends a node's process group SIGTERM."""
        self._send(Frame("terminate", {"node": node}))

    def kill(self, node: str) -> None:
        """Ends a worker, and then what it started, by SIGKILL."""
        self._send(Frame("kill", {"node": node}))

    def pids(self) -> Mapping[str, int]:
        """Returns the process of each node that was started."""
        return dict(self._pids)

    def stacks(self) -> Mapping[str, str]:
        """Returns where the threads of workers were that were asked for it."""
        return dict(self._stacks)

    def close(self) -> None:
        """Ends the agent and all that is left of its workers. May be repeated."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        if self._process.stdout.closed:
            return
        self._closing = True
        self._send(Frame("quit"))
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        give_up_at = time.monotonic() + _QUIT_S
        if self._reader is not None:
            # The link ends with the agent. Its warden, the process started here, may be gone before.
            self._reader.join(_QUIT_S)
        try:
            code = self._process.wait(max(0.0, give_up_at - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        if code != 0:
            # It could not clean up.
            end_marked(self._mark)
        if self._reader is not None:
            self._reader.join()
        self._process.stdout.close()
