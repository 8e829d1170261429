"""The launcher's side of a host: starts its agent and speaks with it."""

import contextlib
import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from launchers._console import Console
from launchers._supervisor import SupervisedProgram
from launchers.host.link import Frame, read_frames, write_all
from launchers.host.sweep import MARK, end_marked
from launchpad_lite._life import Constructed, Ended, HostLost, StopAsked
from launchpad_lite.errors import LaunchError
from launchpad_lite.launching import Address, NodeFailure

if TYPE_CHECKING:
    from courier import ExceptionReport

_LOGGER = logging.getLogger(__name__)

_QUIT_S = 5.0
# With -c, the working directory stands in sys.path: nothing but built-in modules may be imported
# before it is gone, or a json.py of the user's would be.
_BOOT = (
    "import sys\n"
    "sys.path[:] = eval(sys.argv.pop())\n"
    "from launchers.host.agent import main\n"
    "main(int(sys.argv.pop()))\n"
)


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
        self._pids: dict[str, int] = {}
        self._failures: dict[str, NodeFailure] = {}
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
        wanted = [[address.key, address.port] for address in addresses]
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

    def start(self, node: str, payload: bytes, log: Path) -> None:
        """Starts a worker."""
        self._send(Frame("start", {"node": node, "log": str(log)}, payload))

    def listen(self, program: SupervisedProgram) -> None:
        """Passes on, from now on, what the agent says."""
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
        elif frame.op == "constructed":
            program.post(Constructed(node, frame["runs"]))
        elif frame.op == "stop":
            program.post(StopAsked(f"lp.stop() in {node}"))
        elif frame.op == "failed":
            report: ExceptionReport = pickle.loads(frame.body)
            self._failures[node] = NodeFailure.of_exception(node, self.name, report)
        elif frame.op == "refused":
            program.post(Ended(node, NodeFailure(node, self.name, str(frame["text"]))))
        elif frame.op == "exited":
            self._note_exit(node, frame["status"], program)

    def _note_exit(self, node: str, status: int, program: SupervisedProgram) -> None:
        if self._console is not None:
            self._console.finish(node)
        failure = self._failures.get(node)
        if failure is None and status != 0:
            failure = NodeFailure.of_exit(node, self.name, status)
        program.post(Ended(node, failure))

    # What the supervisor asks for

    def request_stop(self, node: str) -> None:
        """Tells a node to end."""
        self._send(Frame("stop", {"node": node}))

    def terminate(self, node: str) -> None:
        """Sends a node's process group SIGTERM."""
        self._send(Frame("signal", {"node": node, "signum": int(signal.SIGTERM)}))

    def kill(self, node: str) -> None:
        """Sends a node's process group SIGKILL."""
        self._send(Frame("signal", {"node": node, "signum": int(signal.SIGKILL)}))

    def pids(self) -> Mapping[str, int]:
        """Returns the process of each node that was started."""
        return dict(self._pids)

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
        try:
            code = self._process.wait(_QUIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        if code != 0:
            # It could not clean up.
            end_marked(self._mark)
        if self._reader is not None:
            self._reader.join()
        self._process.stdout.close()
