"""Moves values between replicas that are threads of one process; arrays of JAX between its devices."""

import copy
import pickle
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from launchpad_lite.replicas._carrier import Carrier, CollectiveCall, Op, check_same
from launchpad_lite.replicas._mailbox import Box
from launchpad_lite.replicas._operations import ArrayOperation
from launchpad_lite.replicas._packing import Packed

T = TypeVar("T")


class MemoryCarrier(Carrier):
    """Between threads of one process; and to other processes through a carrier that they share."""

    def __init__(self, index: int, threads: int, box: Box, outer: Carrier | None = None) -> None:
        """Makes that of one of several threads, which meet in a box of generation 0.

        `outer` is between processes with as many threads each.
        """
        self._outer = outer or Carrier()
        self._index = index
        self._number = 0
        self._threads = threads
        self._box = box
        self._first = self._outer.rank * threads
        self.rank = self._first + index
        self.size = self._outer.size * threads

    def all_reduce(self, array: Any, op: Op, call: CollectiveCall) -> None:
        operation = ArrayOperation(op, array.dtype, self._threads)

        def combine(arrays: list[Any]) -> Any:
            total = arrays[0].copy()
            operation.combine([total, *arrays[1:]], total, last=True)
            self._outer.all_reduce(total, op, call)
            return total

        facts = f"all_reduce({op}) of {array.dtype.str}[{len(array)}]"
        array[...] = self._meet(call, facts, array, combine)

    def all_gather(self, value: Any, call: CollectiveCall) -> Sequence[Any]:
        """Returns copies: no two replicas share an object."""

        def combine(pickles: list[bytes]) -> list[bytes]:
            return [each for part in self._outer.all_gather(pickles, call) for each in part]

        mine = pickle.dumps(value, protocol=5)
        return [pickle.loads(each) for each in self._meet(call, "all_gather", mine, combine)]

    def broadcast(self, array: Any, source: int, call: CollectiveCall) -> None:
        node, index = divmod(source, self._threads)

        def combine(arrays: list[Any]) -> Any:
            sent = arrays[index].copy()  # its owner may change it while others still read
            self._outer.broadcast(sent, node, call)
            return sent

        facts = f"broadcast from {source} of {array.dtype.str}[{len(array)}]"
        sent = self._meet(call, facts, array, combine)
        if source != self.rank:
            array[...] = sent

    def abort(self, error: Exception) -> None:
        self._outer.abort(error)
        self._box.fail(error)

    def _meet(
        self, call: CollectiveCall, facts: str, value: Any, combine: Callable[[list[Any]], T]
    ) -> T:
        """Waits for the same call of each thread; returns the result of their values.

        One of the threads makes it by `combine`, from the values in order. The others wait
        meanwhile.
        """

        def join(turns: Sequence[tuple[CollectiveCall, Any]]) -> T:
            calls, values = zip(*turns, strict=True)
            check_same(calls, self._first)
            return combine(list(values))

        self._number += 1
        mine = call._replace(facts=facts), value
        try:
            answer = self._box.meet(0, self._number, self._index, mine, (join, self._threads))
            result: T = answer.result()
        except Exception as error:  # noqa: BLE001 - a traceback belongs to one thread
            raise copy.copy(error) from error.__cause__
        return result


class JaxMesh:
    """Devices of JAX, one for each replica of this process."""

    def __init__(self, devices: Sequence[Any]) -> None:
        import jax
        import numpy as np

        self.devices = list(devices)
        self._mesh = jax.sharding.Mesh(np.array(self.devices), ("replicas",))
        self._split = jax.sharding.PartitionSpec("replicas")
        self._combine = jax.jit(self._mapped, static_argnums=1)
        #: Adds a first dimension of length 1 to arrays.
        self.widened = jax.jit(lambda leaves: [leaf[None] for leaf in leaves])

    def reduced(self, given: Sequence[Sequence[Any]], op: Op) -> list[list[Any]]:
        """Returns arrays combined over the devices, for each device on that device.

        Those in `given` are on each device, after a first dimension of length 1.
        """
        import jax

        sharding = jax.sharding.NamedSharding(self._mesh, self._split)
        arrays = [
            jax.make_array_from_single_device_arrays(
                (len(parts), *parts[0].shape[1:]), sharding, list(parts)
            )
            for parts in zip(*given, strict=True)
        ]
        results = [
            {shard.device: shard.data for shard in array.addressable_shards}
            for array in self._combine(arrays, op)
        ]
        return [[on[device] for on in results] for device in self.devices]

    def _mapped(self, arrays: list[Any], op: Op) -> Any:
        """Returns arrays combined over the mesh; compiled for each `op`."""
        import jax

        # Values are then the same on all devices; JAX cannot prove that of products.
        return jax.shard_map(
            lambda leaves: [_combined(leaf[0], op) for leaf in leaves],
            mesh=self._mesh,
            in_specs=self._split,
            out_specs=jax.sharding.PartitionSpec(),
            check_vma=False,
        )(arrays)


def _combined(leaf: Any, op: Op) -> Any:
    """Returns an array combined over the mesh, as numpy would combine it; in a compiled function."""
    import jax
    import jax.numpy as jnp

    if leaf.dtype == bool and op != "mean":
        return _combined(leaf.astype(jnp.int8), op).astype(bool)
    if jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype.itemsize < 4:
        # Sums would lose too much.
        return _combined(leaf.astype(jnp.float32), op).astype(leaf.dtype)
    if op == "mean":
        is_whole = not jnp.issubdtype(leaf.dtype, jnp.inexact)
        return jax.lax.pmean(leaf.astype(float) if is_whole else leaf, "replicas")
    if op == "product":
        return jnp.prod(jax.lax.all_gather(leaf, "replicas"), axis=0, dtype=leaf.dtype)
    combine = {"sum": jax.lax.psum, "max": jax.lax.pmax, "min": jax.lax.pmin}[op]
    return combine(leaf, "replicas")


class JaxCarrier(MemoryCarrier):
    """Between replicas that are threads of one process, each with a device of JAX.

    Arrays of JAX go from device to device, and between processes through the host. All else is
    combined in memory.
    """

    aside = "jax"

    def __init__(self, index: int, mesh: JaxMesh, box: Box, outer: Carrier | None = None) -> None:
        """As for MemoryCarrier; the mesh has the devices of the threads."""
        super().__init__(index, len(mesh.devices), box, outer)
        self._mesh = mesh

    def all_reduce(self, array: Any, op: Op, call: CollectiveCall) -> None:
        """Combines arrays of JAX on the devices; the order of additions is that of XLA."""
        if not isinstance(array, list):
            super().all_reduce(array, op, call)
            return
        import jax

        for leaf in array:
            _check_can_be_combined(leaf.dtype, op)

        def combine(given: list[Any]) -> list[list[Any]]:
            results = self._mesh.reduced(given, op)
            if self._outer.size == 1:
                return results
            return self._everywhere(results[0], lambda flat: self._outer.all_reduce(flat, op, call))

        here = self._mesh.devices[self._index]
        given = self._mesh.widened(jax.device_put(array, here))
        _put_back(array, self._meet(call, f"all_reduce({op})", given, combine)[self._index])

    def broadcast(self, array: Any, source: int, call: CollectiveCall) -> None:
        """Copies arrays of JAX from one device to the others."""
        if not isinstance(array, list):
            super().broadcast(array, source, call)
            return
        node, index = divmod(source, self._threads)

        def combine(given: list[Any]) -> list[list[Any]]:
            return self._everywhere(
                given[index], lambda flat: self._outer.broadcast(flat, node, call)
            )

        results = self._meet(call, f"broadcast from {source}", list(array), combine)
        _put_back(array, results[self._index])

    def _everywhere(self, leaves: list[Any], exchange: Callable[[Any], None]) -> list[list[Any]]:
        """Returns arrays on each device, after flat ones were exchanged with other processes."""
        import jax

        if self._outer.size > 1:
            packed = Packed(leaves)
            for flat in packed.arrays.values():
                exchange(flat)
            leaves = packed.unpacked()
        return [jax.device_put(leaves, device) for device in self._mesh.devices]


def _check_can_be_combined(dtype: Any, op: Op) -> None:
    kind = getattr(dtype, "kind", "")
    if not kind:
        raise TypeError(f"arrays of {dtype} cannot be combined: they are no numbers")
    if op != "mean" or kind not in "iub":
        ArrayOperation(op, dtype, 1)  # raises as other carriers do


def _put_back(array: list[Any], results: list[Any]) -> None:
    """Replaces arrays by results, on the devices of the former."""
    import jax

    array[:] = [
        jax.device_put(result, leaf.sharding) for result, leaf in zip(results, array, strict=True)
    ]
