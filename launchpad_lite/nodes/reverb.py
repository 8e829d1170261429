"""Replay buffers as nodes: servers of DeepMind's Reverb.

Neither reverb nor TensorFlow, which comes with it, is imported before a node runs.
"""

import importlib.util
import logging
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from courier.lowlevel import split_address
from launchpad_lite.nodes.base import Handle, Node, PlanContext, Task
from launchpad_lite.nodes.python import require_callable
from launchpad_lite.parts.arguments import name_of
from launchpad_lite.parts.private_files import make_own_folder
from launchpad_lite.parts.settings import check_quantity
from launchpad_lite.worker.address import Address
from launchpad_lite.worker.runtime import NodeRuntime

if TYPE_CHECKING:
    import reverb

    _Client: TypeAlias = reverb.Client
    _Tables: TypeAlias = Callable[[], Sequence[reverb.Table]]
    _CheckpointerMaker: TypeAlias = Callable[[], reverb.checkpointers.CheckpointerBase]
else:
    _Client = _Tables = _CheckpointerMaker = Any

_LOGGER = logging.getLogger(__name__)

#: Nodes that are threads begin at once, and the packages below Reverb import in circles.
_loading = threading.Lock()
#: In the node's folder of checkpoints: Reverb writes here, and it is moved from here.
_STAGING = "reverb"


def _load() -> Any:
    with _loading:
        import reverb

        return reverb


class ReverbHandle(Handle[_Client]):
    """A handle to a ReverbNode; dereferences to a `reverb.Client`."""

    def __init__(self, node: "ReverbNode") -> None:
        super().__init__(node)
        self.address = node.reverb_address

    def dereference(self) -> _Client:
        """Returns a new client; its calls wait until the server is up."""
        endpoint = self.address.resolve()
        return _load().Client(endpoint)


class ReverbNode(Node[_Client]):
    """A replay buffer: a `reverb.Server`, whose handle becomes a `reverb.Client`.

    It serves until the program stops. A client must not wait for samples then: Reverb's
    `client.sample` does not return while too few come, nor when the server has gone. Where the
    program may stop meanwhile, sample from a `reverb.TrajectoryDataset` with
    `rate_limiter_timeout_ms` and look at `lp.stop_event()` between two timeouts.

    Reverb knows nothing of the program's secret, and listens on all interfaces of its machine, because
    it takes a port and no host: any process that can reach that port can read and change what is in the
    tables. Use it in a network that you trust, or behind a firewall.

    Checkpoints are written at an orderly stop and on a period, and read at the next start:

    - `lp.launch(..., checkpoints=...)` says where for any node: if this one has a folder from
      there, that is used. Reverb's files are kept in it like the state of any node, `keep` of them,
      and `checkpoint_ctor` is not called. Checkpoints of `client.checkpoint()` are not kept then.
    - Otherwise `checkpoint_ctor` says where. Reverb removes no old checkpoints there.
    - With neither, Reverb has no checkpointer.

    Both periods hold, that of the node and that of the launch. A periodic checkpoint that fails is
    logged; the one at the end fails the node.

    After the node of this name in Launchpad (https://arxiv.org/abs/2106.04516) and Reverb
    (https://arxiv.org/abs/2102.04736).

    Example:
        replay = program.add_node(lp.ReverbNode(make_tables), label="replay")
        program.add_node(lp.CourierNode(Learner, replay), label="learner")  # gets a reverb.Client
    """

    def __init__(
        self,
        priority_tables_fn: _Tables,
        checkpoint_ctor: _CheckpointerMaker | None = None,
        checkpoint_time_delta_minutes: float | None = None,
    ) -> None:
        """Describes the node.

        Args:
            priority_tables_fn: Returns the tables; called in the node.
            checkpoint_ctor: Returns a checkpointer; called in the node.
            checkpoint_time_delta_minutes: Minutes between checkpoints. None: only at an orderly
                stop, and as the launch says.

        Raises:
            TypeError: A function cannot be called, or the minutes are no number.
            ValueError: The minutes are not above 0, or not finite.
        """
        super().__init__()
        require_callable(type(self), priority_tables_fn)
        if checkpoint_ctor is not None and not callable(checkpoint_ctor):
            raise TypeError(
                "checkpoint_ctor is a function that returns a checkpointer, because that is made in "
                f"the node; not {checkpoint_ctor!r}"
            )
        minutes = checkpoint_time_delta_minutes
        if minutes is not None:
            check_quantity("checkpoint_time_delta_minutes", minutes, positive=True)
        self._named_after = name_of(priority_tables_fn)
        # Reverb's gRPC sets SO_REUSEPORT, so the port can be held for it.
        self._address = Address("reverb")
        self._own_addresses = (self._address,)
        self._work = ReverbWork(priority_tables_fn, checkpoint_ctor, minutes, self._address)

    @property
    def reverb_address(self) -> Address:
        """Where the server will listen."""
        return self._address

    def create_handle(self) -> ReverbHandle:
        """Returns a new handle; in a running node it becomes a `reverb.Client`."""
        return ReverbHandle(self)

    def to_executables(self, context: PlanContext) -> Sequence[Task]:
        """Returns one task."""
        # Looks for it without loading it.
        if importlib.util.find_spec("reverb") is None:
            raise ValueError(
                f"{self.description} needs Reverb, which is not installed here: "
                "pip install 'launchpad-lite[reverb]' (on Linux with x86 and Python 3.11 or older: there "
                "is no dm-reverb for others)"
            )
        work = self._work
        if work.minutes and work.checkpoint_ctor is None and not context.keeps_state:
            raise ValueError(
                f"checkpoint_time_delta_minutes={work.minutes:g}, but no folder: give "
                "ReverbNode a checkpoint_ctor, or lp.launch(..., checkpoints=folder)"
            )
        return [Task(work, self.addresses, self.description)]


@dataclass(frozen=True)
class ReverbWork:
    """Runs a Reverb server."""

    priority_tables_fn: _Tables
    checkpoint_ctor: _CheckpointerMaker | None
    minutes: float | None
    address: Address

    def __call__(self, runtime: NodeRuntime) -> None:
        """Does it."""
        kept = runtime.setup.checkpoints
        if kept is not None:
            staged = _StagedReplay(self.priority_tables_fn, self._port(), kept.folder / _STAGING)
            try:
                with runtime.state.kept(staged):
                    staged.start(staged.checkpointer())
                    self._serve(runtime, runtime.state.save)
            finally:
                staged.stop()
            return
        replay = _Replay(self.priority_tables_fn, self._port())
        _load()  # nodes that are threads load it in turns, before code of users does
        checkpointer = None if self.checkpoint_ctor is None else self.checkpoint_ctor()
        save = replay.checkpoint if checkpointer is not None else lambda: None
        replay.start(checkpointer)
        try:
            self._serve(runtime, save)
            save()
        finally:
            replay.stop()

    def _port(self) -> int:
        return split_address(self.address.resolve())[1]

    def _serve(self, runtime: NodeRuntime, save: Callable[[], object]) -> None:
        with runtime.at_work(runs=False):
            while not runtime.wait_for_stop(None if self.minutes is None else 60 * self.minutes):
                try:
                    save()
                except Exception:
                    # As for all checkpoints: a full disk ends no node.
                    _LOGGER.exception("%s: a checkpoint could not be written", runtime.name)

    def parts(self) -> Mapping[str, object]:
        """Returns the functions by name."""
        return {
            f"priority_tables_fn {name_of(self.priority_tables_fn)}": self.priority_tables_fn,
            "checkpoint_ctor": self.checkpoint_ctor,
        }


class _Replay:
    """A server in this process."""

    def __init__(self, priority_tables_fn: _Tables, port: int) -> None:
        self._make_tables = priority_tables_fn
        self._port = port
        self._server: Any = None
        self._client: Any = None

    def start(self, checkpointer: Any) -> None:
        """Serves the state that the checkpointer finds; None keeps nothing."""
        reverb = _load()

        class NoCheckpointer(reverb.checkpointers.CheckpointerBase):  # type: ignore[misc, name-defined]
            # Without one, Reverb makes a temporary folder and never removes it.
            def internal_checkpointer(self) -> None:
                return None

        self._server = reverb.Server(
            self._make_tables(), port=self._port, checkpointer=checkpointer or NoCheckpointer()
        )
        self._client = self._server.localhost_client()

    def checkpoint(self) -> Path:
        """Makes the server write a checkpoint; returns its folder."""
        return Path(self._client.checkpoint())

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop()


class _StagedReplay(_Replay):
    """A server whose checkpoints are kept as the state of the node."""

    def __init__(self, priority_tables_fn: _Tables, port: int, staging: Path) -> None:
        super().__init__(priority_tables_fn, port)
        self._staging = staging
        self._restored: str | None = None

    def checkpointer(self) -> Any:
        """Returns a checkpointer that writes to the staging folder and reads the restored state."""
        make_own_folder(self._staging.parent)  # its content is removed, or read
        # An earlier server may have been killed while it wrote; Reverb would go on from there.
        shutil.rmtree(self._staging, ignore_errors=True)
        return _load().checkpointers.DefaultCheckpointer(
            str(self._staging), fallback_checkpoint_path=self._restored
        )

    def save(self, folder: Path) -> None:
        """Writes a checkpoint. The server must be up."""
        written = self.checkpoint()
        # Within one file system, so that this copies nothing.
        written.rename(folder / "tables")
        # The name of a checkpoint is its time, and Reverb checks nothing else.
        shutil.rmtree(self._staging, ignore_errors=True)

    def restore(self, folder: Path) -> None:
        """Makes the server begin with a checkpoint."""
        self._restored = str(folder / "tables")
