"""Moves arrays between replicas by process groups of torch.distributed: gloo, and NCCL on GPUs.

Groups are made directly, not by `init_process_group`: one process may have many, also in threads.
They find each other by keys and values on replica 0. gloo and NCCL do not know the program's
secret: as always with torch.distributed, the network must be trusted.
"""

import asyncio
import contextlib
import ctypes
import functools
import hashlib
import os
import pickle
import socket
import stat
import struct
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import courier
from launchpad_lite.replicas._call import Call, check_same
from launchpad_lite.replicas._carrier import Carrier, Op
from launchpad_lite.replicas.errors import ReplicaLostError

if TYPE_CHECKING:
    import numpy as np

# That a replica is lost is noticed elsewhere; one that is only slow may be waited for.
_FOREVER = timedelta(days=365)
_CONNECT = timedelta(seconds=60)
_CLOSE_S = 10.0
_POLL_S = 1.0  # how long a call for a key waits on replica 0
_DIGEST_BYTES = 16
_IN_BAND_BYTES = 1 << 16  # smaller arrays are not worth a message of their own

# What gloo can add; the names are those of torch, and of numpy.
_GLOO_DTYPES = {"float16", "bfloat16", "float32", "float64", "int8", "uint8", "int32", "int64"}


class KeyValues:
    """Keys and values that replica 0 serves: by them process groups find each other."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = asyncio.Condition()

    async def set(self, key: str, value: bytes) -> None:
        """Sets a value, and wakes all who wait for it."""
        async with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    async def get(self, key: str, wait_s: float) -> bytes | None:
        """Returns a value, as soon as it is there; None if that takes longer than `wait_s`."""
        async with self._changed:
            with contextlib.suppress(asyncio.TimeoutError):
                there = self._changed.wait_for(lambda: key in self._values)
                await asyncio.wait_for(there, wait_s)
        return self._values.get(key)

    async def add(self, key: str, amount: int) -> int:
        """Adds to a number, which begins at 0, and returns the sum."""
        total = int(self._values.get(key, b"0")) + amount
        await self.set(key, str(total).encode())
        return total

    async def compare_set(self, key: str, expected: bytes, value: bytes) -> bytes:
        """Sets a value if it is the expected one, or missing and b"" is; returns what it is now."""
        if self._values.get(key, b"") == expected:
            await self.set(key, value)
        return self._values.get(key, expected)

    async def check(self, keys: Sequence[str]) -> bool:
        """Returns whether all keys have values."""
        return all(key in self._values for key in keys)

    async def delete(self, key: str) -> bool:
        """Removes a value; returns whether there was one."""
        return self._values.pop(key, None) is not None


class TorchCarrier(Carrier):
    """Over process groups. Tensors on a GPU are combined there.

    All replicas first compare digests of their calls, by gloo: a round trip for each call.

    NCCL is written against its interface and has not run on a GPU yet.
    """

    def __init__(
        self,
        values: Any,
        rank: int,
        size: int,
        *,
        host: str,
        prefix: str = "",
        device: Any = None,
    ) -> None:
        """Prepares it; `connect` connects.

        Args:
            values: A client of the `KeyValues` on replica 0.
            rank: Which replica this is.
            size: How many there are.
            host: Name or address by which the other replicas reach this machine.
            prefix: What its keys begin with; another one each time that replicas connect.
            device: The GPU of this replica, as a `torch.device`; None if it has none.
        """
        self.rank = rank
        self.size = size
        self.on_gpu = device is not None
        self._values = values
        self._host = host
        self._prefix = prefix
        self._device = device
        self._store: Any = None
        self._gloo: Any = None
        self._nccl: Any = None
        self._stream: Any = None
        self._work: Any = None
        self._error: Exception | None = None

    def connect(self) -> None:
        """Connects to all other replicas; `abort` ends it.

        Raises:
            ReplicaLostError: One of them does not come, or cannot be reached, within a minute.
        """
        self._store = _store_class()(self._values, lambda: self._error)
        try:
            self._gloo = self._make_gloo()
            if self._device is not None:
                self._nccl = self._make_nccl()
        except RuntimeError as error:
            raise self._what_happened(error) from error

    def _make_gloo(self) -> Any:
        from torch.distributed import PrefixStore
        from torch.distributed.distributed_c10d import ProcessGroupGloo

        options = ProcessGroupGloo._Options()
        options._devices = [ProcessGroupGloo.create_device(hostname=self._host)]
        options._timeout = _CONNECT
        return ProcessGroupGloo(
            PrefixStore(f"{self._prefix}gloo", self._store), self.rank, self.size, options
        )

    def _make_nccl(self) -> Any:
        import torch
        from torch.distributed import PrefixStore
        from torch.distributed.distributed_c10d import ProcessGroupNCCL

        # Otherwise its watchdog ends the process when another replica is lost.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        options = ProcessGroupNCCL.Options()
        options._timeout = _FOREVER
        self._stream = torch.cuda.Stream(self._device)
        return ProcessGroupNCCL(
            PrefixStore(f"{self._prefix}nccl", self._store), self.rank, self.size, options
        )

    def all_reduce(self, array: Any, op: Op, call: Call) -> None:
        """Combines the arrays of all replicas, in place; see `Carrier`.

        Raises:
            CollectiveMismatchError: Replicas made different calls.
            ReplicaLostError: One of them is lost.
        """
        self._agree(call)
        tensor = _as_tensor(array)
        if tensor is None or str(tensor.dtype).removeprefix("torch.") not in _GLOO_DTYPES:
            _combine(array, self._exchange(array), op)
        elif tensor.numel() and tensor.is_cuda:
            self._reduce_on_gpu(tensor, op)
        elif tensor.numel():
            self._reduce(self._gloo, tensor, op)

    def _reduce(self, group: Any, tensor: Any, op: Op) -> None:
        from torch.distributed import AllreduceOptions, ReduceOp

        options = AllreduceOptions()
        options.timeout = _FOREVER
        names = {"mean": "SUM", "product": "PRODUCT"}  # gloo has no mean
        options.reduceOp = getattr(ReduceOp, names.get(op, op.upper()))
        self._wait(group.allreduce([tensor], options))
        if op == "mean":
            tensor.div_(self.size)

    def _reduce_on_gpu(self, tensor: Any, op: Op) -> None:
        import torch

        # A stream of its own: later kernels of the caller run while this waits for other replicas.
        self._stream.wait_stream(torch.cuda.default_stream(tensor.device))
        with torch.cuda.stream(self._stream):
            self._reduce(self._nccl, tensor, op)
        self._stream.synchronize()
        if self._error is not None:
            raise self._error

    def all_gather(self, value: Any, call: Call) -> Sequence[Any]:
        """Returns what each replica gave; see `Carrier`.

        Raises:
            CollectiveMismatchError: Replicas made different calls.
            ReplicaLostError: One of them is lost.
        """
        self._agree(call)
        return self._exchange(value)

    def _exchange(self, value: Any) -> list[Any]:
        import numpy as np

        large: list[np.ndarray[Any, Any]] = []
        head = pickle.dumps(value, 5, buffer_callback=functools.partial(_take_large, large))
        sizes = [len(head), *[buffer.nbytes for buffer in large]]
        values = []
        for rank, lengths in enumerate(self._exchange_sizes(sizes)):
            parts = [np.frombuffer(head, np.uint8), *large]
            if rank != self.rank:
                parts = [np.empty(length, np.uint8) for length in lengths]
            for part in parts:
                self._send(part, rank)
            values.append(
                value if rank == self.rank else pickle.loads(parts[0].data, buffers=parts[1:])
            )
        return values

    def _exchange_sizes(self, sizes: list[int]) -> list[list[int]]:
        """Returns the sizes of all replicas, which may differ in number."""
        import numpy as np

        counts = self._swap(struct.pack("<q", len(sizes)))
        lengths = [struct.unpack("<q", count)[0] for count in counts]
        mine = np.zeros(max(lengths), np.int64)
        mine[: len(sizes)] = sizes
        rows = [np.frombuffer(row, np.int64) for row in self._swap(mine.tobytes())]
        return [row[:length].tolist() for row, length in zip(rows, lengths, strict=True)]

    def broadcast(self, array: Any, source: int, call: Call) -> None:
        """Gives all replicas the array of one of them, in place; see `Carrier`.

        Raises:
            CollectiveMismatchError: Replicas made different calls.
            ReplicaLostError: One of them is lost.
        """
        import numpy as np
        import torch

        self._agree(call)
        as_bytes = array.view(np.uint8 if isinstance(array, np.ndarray) else torch.uint8)
        if not isinstance(array, np.ndarray) and array.is_cuda:
            self._stream.wait_stream(torch.cuda.default_stream(array.device))
            with torch.cuda.stream(self._stream):
                self._send(as_bytes, source, self._nccl)
            self._stream.synchronize()
        else:
            self._send(as_bytes, source)

    def _send(self, array: Any, source: int, group: Any = None) -> None:
        from torch.distributed import BroadcastOptions

        tensor = _as_tensor(array)
        if tensor.numel() == 0:
            return
        options = BroadcastOptions()
        options.timeout = _FOREVER
        options.rootRank = source
        self._wait((group or self._gloo).broadcast([tensor], options))

    def buffer(self, nbytes: int) -> "np.ndarray[Any, Any]":
        """Returns memory: gloo has none that it is faster with."""
        import numpy as np

        return np.zeros(nbytes, np.uint8)

    def _agree(self, call: Call) -> None:
        """Checks that all replicas make this call."""
        text = repr((call.number, call.signature)).encode()
        digests = self._swap(hashlib.blake2b(text, digest_size=_DIGEST_BYTES).digest())
        if len(set(digests)) > 1:
            check_same(self._exchange(call))

    def _swap(self, mine: bytes) -> list[bytes]:
        """Returns what each replica gave, of the same length in all."""
        import torch
        from torch._C._distributed_c10d import AllgatherOptions

        options = AllgatherOptions()
        options.timeout = _FOREVER
        given = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        taken = torch.empty(self.size * len(mine), dtype=torch.uint8)
        if self._error is not None:
            raise self._error
        self._wait(self._gloo._allgather_base(taken, given, options))
        data = taken.numpy().tobytes()
        return [data[start : start + len(mine)] for start in range(0, len(data), len(mine))]

    def _wait(self, work: Any) -> None:
        self._work = work
        try:
            while not work.is_completed():
                self._wait_a_little(work)
            work.wait()
        except RuntimeError as error:
            raise self._what_happened(error) from error

    def _wait_a_little(self, work: Any) -> None:
        try:
            work.wait(timedelta(seconds=_POLL_S))
        except RuntimeError:
            if work.is_completed() or self._error is not None:
                raise

    def _what_happened(self, error: RuntimeError) -> Exception:
        if self._error is not None:
            return self._error
        return ReplicaLostError(
            f"replica {self.rank} of {self.size} at {self._host}: its connection to another "
            f"replica failed: {error}"
        )

    def abort(self, error: Exception) -> None:
        """Has calls in flight, and all later ones, raise this error soon. Thread-safe."""
        self._error = self._error or error
        if self._store is not None:
            _shut_down(self._store.addresses)
        if self._nccl is not None:
            self._nccl.abort()

    def close(self) -> None:
        """Frees what it has, once the other replicas close theirs, or after some seconds."""
        if self._gloo is not None and self._error is None:
            with contextlib.suppress(courier.CourierError):  # replica 0 is gone: all have ended
                self._wait_for_others()
        if self._work is not None and not self._work.is_completed():
            # Its destructor would wait for the call, for ever, also at the end of the process.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._gloo))
        self._work = self._gloo = self._nccl = None

    def _wait_for_others(self) -> None:
        """Lets others end their last call, in which gloo fails if a connection is closed."""
        self._values.set(f"{self._prefix}closed/{self.rank}", b"")
        until = time.monotonic() + _CLOSE_S
        for rank in range(self.size):
            while self._values.get(f"{self._prefix}closed/{rank}", _POLL_S) is None:
                if self._error is not None or time.monotonic() > until:
                    return


def _take_large(large: "list[np.ndarray[Any, Any]]", buffer: pickle.PickleBuffer) -> bool:
    """Keeps the memory of a large array out of a pickle; returns whether it has to be in it."""
    import numpy as np

    memory = np.frombuffer(buffer.raw(), np.uint8)
    if memory.nbytes < _IN_BAND_BYTES:
        return True
    large.append(memory)
    return False


def _as_tensor(array: Any) -> Any:
    """Returns a tensor in the memory of an array; None if torch has no such type."""
    import numpy as np
    import torch

    if not isinstance(array, np.ndarray):
        return array.detach()
    if not array.flags.writeable:  # torch has no tensors that cannot be written
        array = array.copy()
    try:
        return torch.from_numpy(array)
    except TypeError:
        return None


def _combine(array: Any, arrays: Sequence[Any], op: Op) -> None:
    """Writes what arrays are together into one of them."""
    import numpy as np

    ufunc = {"max": np.maximum, "min": np.minimum, "product": np.multiply}.get(op, np.add)
    total = functools.reduce(ufunc, [np.asarray(each) for each in arrays])
    np.asarray(array)[...] = total / len(arrays) if op == "mean" else total


@functools.cache
def _store_class() -> Any:
    """Returns the class of stores, which needs torch."""
    from torch.distributed import Store

    class CourierStore(Store):  # type: ignore[misc]  # mypy does not read torch
        """A torch.distributed store over `KeyValues`."""

        def __init__(self, values: Any, error: Any) -> None:
            super().__init__()
            self._values = values
            self._error = error
            self.addresses: set[tuple[str, int]] = set()

        def set(self, key: str, value: bytes) -> None:
            self._values.set(key, bytes(value))

        def get(self, key: str) -> bytes:
            while (value := self._values.get(key, _POLL_S)) is None:
                if self._error() is not None:
                    raise self._error()
            if (address := _parse_address(value)) is not None:
                self.addresses.add(address)
            return bytes(value)

        def wait(self, keys: Sequence[str], timeout: Any = None) -> None:  # noqa: ARG002
            for key in keys:
                self.get(key)

        def add(self, key: str, amount: int) -> int:
            return int(self._values.add(key, amount))

        def compare_set(self, key: str, expected: bytes, value: bytes) -> bytes:
            return bytes(self._values.compare_set(key, bytes(expected), bytes(value)))

        def check(self, keys: Sequence[str]) -> bool:
            return bool(self._values.check(list(keys)))

        def delete_key(self, key: str) -> bool:
            return bool(self._values.delete(key))

        def clone(self) -> Any:
            return self

    return CourierStore


def _parse_address(value: bytes) -> tuple[str, int] | None:
    """Returns where gloo of a replica listens: it says so as name, length and a `sockaddr`."""
    try:
        (length,) = struct.unpack_from("<Q", value)
        family, port = struct.unpack_from("=H2s", value, 16 + length)
        width, start = {socket.AF_INET: (4, 4), socket.AF_INET6: (16, 8)}[family]
        packed = value[16 + length + start :][:width]
        return socket.inet_ntop(family, packed), int.from_bytes(port, "big")
    except (struct.error, KeyError, ValueError, OverflowError):
        return None  # not from gloo, or from another release of it


def _shut_down(addresses: set[tuple[str, int]]) -> None:
    """Ends the connections of gloo, which has no call for it: a replica that waits gets an error.

    Args:
        addresses: Where replicas listen: one end of each connection.
    """
    for descriptor in [int(path.name) for path in Path("/dev/fd").iterdir()]:
        with contextlib.suppress(OSError):  # it is closed by now, or is not connected
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                continue
            with socket.socket(fileno=os.dup(descriptor)) as end:
                if {end.getsockname()[:2], end.getpeername()[:2]} & addresses:
                    end.shutdown(socket.SHUT_RDWR)
