"""Combines tensors on their GPUs, by NCCL; all else goes by another carrier.

Its tests run it with gloo on CPU tensors. It ran on one GPU, where each group is of one replica.
"""

import logging
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from launchpad_lite.replicas._carrier import NEWS_S, Array, Carrier, CollectiveCall, Op
from launchpad_lite.replicas.errors import ReplicaError

_LOGGER = logging.getLogger(__name__)
#: Seconds between two checks of a call; the meeting notices lost replicas, and slow ones are waited
#: for.
_FOREVER = timedelta(days=365)
_LOOK_S = 1.0


class GpuCarrier(Carrier):
    """Moves tensors by NCCL, which does not know the program's secret; all else by another carrier."""

    def __init__(self, other: Carrier, host: str, device: str = "cuda") -> None:
        """Makes it; it connects at the first call with a tensor on a GPU.

        The others reach replica 0 at `host`. The device is `cpu` for tests, which use gloo.
        """
        self.rank, self.size = other.rank, other.size
        self._other = other
        self._host = host
        self._device = device
        self._group: Any = None
        self._error: Exception | None = None
        self._is_aborted = threading.Event()

    def takes(self, device: Any, call: CollectiveCall) -> bool:
        """Returns whether each replica has a GPU of its own: NCCL refuses two on one."""
        import torch

        # Old versions of PyTorch do not know it.
        gpu = str(getattr(torch.cuda.get_device_properties(device), "uuid", self.rank))
        gpus = self._other.all_gather(gpu, call)
        if gpus.index(gpu) == self.rank and (sharing := gpus.count(gpu)) > 1:
            _LOGGER.warning(
                "%d replicas share a GPU: gradients go through memory of the host", sharing
            )
        return len(set(gpus)) == self.size

    def all_reduce(self, array: Any, op: Op, call: CollectiveCall) -> None:
        device = getattr(array, "device", None)  # arrays of numpy have none, or a text
        if getattr(device, "type", None) != self._device:
            self._other.all_reduce(array, op, call)
            return
        from torch.distributed import AllreduceOptions, ReduceOp

        # All replicas make this call: NCCL would hang, or add unrelated numbers.
        self._other.all_gather(None, call)
        options = AllreduceOptions()
        options.timeout = _FOREVER
        options.reduceOp = ReduceOp.SUM if op == "mean" else getattr(ReduceOp, op.upper())
        if op == "mean":  # gloo has none; before the sum, which may be too large for float16
            array.div_(self.size)
        self._run(array, options)

    def broadcast(self, array: Any, source: int, call: CollectiveCall) -> None:
        self._other.broadcast(array, source, call)

    def all_gather(self, value: Any, call: CollectiveCall) -> Sequence[Any]:
        return self._other.all_gather(value, call)

    def buffer(self, nbytes: int) -> Array:
        return self._other.buffer(nbytes)

    def abort(self, error: Exception) -> None:
        self._error = self._error or error
        self._is_aborted.set()
        self._other.abort(error)
        if self._group is not None and hasattr(self._group, "abort"):
            self._group.abort()

    def close(self) -> None:
        self._group = None
        self._other.close()

    def _connect(self) -> Any:
        """Connects all replicas. Takes a free port on the machine of replica 0."""
        from torch.distributed import PrefixStore, TCPStore, distributed_c10d as c10d

        port, store = None, None
        if self.rank == 0:
            store = TCPStore(self._host, 0, is_master=True, wait_for_workers=False)
            port = store.port
        ports = self._other.all_gather(port, CollectiveCall(0, "connect GPUs"))
        if store is None:
            store = TCPStore(self._host, ports[0], is_master=False)
        store = PrefixStore("replicas", store)
        if self._device == "cpu":
            return c10d.ProcessGroupGloo(store, self.rank, self.size, timedelta(seconds=60))
        options = c10d.ProcessGroupNCCL.Options()
        options._timeout = _FOREVER
        return c10d.ProcessGroupNCCL(store, self.rank, self.size, options)

    def _run(self, array: Any, options: Any) -> None:
        try:
            if self._group is None:
                self._group = self._connect()
            work = self._group.allreduce([array], options)
            while not work.is_completed():
                try:
                    work.wait(timedelta(seconds=_LOOK_S))
                except RuntimeError:
                    if work.is_completed() or self._error is not None:
                        raise
            work.wait()
        except ReplicaError:
            raise
        except RuntimeError as error:
            # Most likely a replica is lost: `abort` follows soon.
            self._is_aborted.wait(NEWS_S)
            raise self._error or error from error
