"""Tensors on a device, with CPU tensors and gloo in the place of GPUs and NCCL."""

import contextlib
import threading
import types
from typing import Any

import numpy as np
import pytest

from launchpad_lite.replicas import CollectiveMismatchError, ReplicaLostError
from launchpad_lite.replicas._carrier import CollectiveCall
from launchpad_lite.replicas._gpu_carrier import GpuCarrier
from tests.engines import needs_torch
from tests.launchpad_lite.replicas.carriers import run
from tests.launchpad_lite.replicas.together import in_memory

with contextlib.suppress(ImportError):
    import torch

pytestmark = [needs_torch, pytest.mark.slow]


def gpu_carriers(size: int) -> list[GpuCarrier]:
    return [GpuCarrier(carrier, "127.0.0.1", device="cpu") for carrier in in_memory(size)]


@pytest.mark.parametrize("op", ["sum", "mean", "max", "min", "product"])
def test_tensors_are_combined_where_they_are(op: str) -> None:
    def reduce(carrier: Any) -> Any:
        tensor = torch.arange(3, dtype=torch.float32) + carrier.rank + 1
        carrier.all_reduce(tensor, op, CollectiveCall(1, "reduce"))
        return tensor.tolist()

    values = np.arange(3) + np.array([[1], [2], [3]])
    definition = {"product": "prod"}.get(op, op)
    expected = getattr(np, definition)(values, axis=0).tolist()
    assert run(gpu_carriers(3), reduce) == [pytest.approx(expected)] * 3


def test_all_else_goes_the_other_way() -> None:
    def exchange(carrier: Any) -> Any:
        array = np.full(2, carrier.rank)
        carrier.broadcast(array, 1, CollectiveCall(1, "array"))
        carrier.all_reduce(array, "sum", CollectiveCall(2, "sum"))
        return array.tolist(), carrier.all_gather(carrier.rank, CollectiveCall(3, "ranks"))

    assert run(gpu_carriers(2), exchange) == [([2, 2], [0, 1])] * 2


def test_different_calls_are_told_before_tensors_move() -> None:
    def differ(carrier: Any) -> None:
        carrier.all_reduce(
            torch.zeros(2 + carrier.rank), "sum", CollectiveCall(1, f"[{2 + carrier.rank}]")
        )

    errors = run(gpu_carriers(2), differ)
    assert [type(error) for error in errors] == [CollectiveMismatchError] * 2


@pytest.mark.parametrize("dies", [False, True])
def test_a_call_in_flight_ends_with_the_loss_of_a_peer(dies: bool) -> None:
    carriers = gpu_carriers(2)

    def reduce(carrier: Any) -> None:
        carrier.all_reduce(torch.zeros(2), "sum", CollectiveCall(1, "both"))
        if carrier.rank == 0:
            carrier.all_reduce(torch.zeros(2), "sum", CollectiveCall(2, "one"))
            return
        if dies:
            carrier._other.all_gather(None, CollectiveCall(2, "one"))
            carrier._group = None  # closes its connections, as the end of its process does
        lost = ReplicaLostError("replica 1 was lost")
        threading.Timer(0.1, carriers[0].abort, [lost]).start()  # the news comes later

    error, none = run(carriers, reduce)
    assert isinstance(error, ReplicaLostError)
    assert none is None


def test_the_mean_of_large_float16_is_finite() -> None:
    def reduce(carrier: Any) -> Any:
        tensor = torch.full((2,), 40_000.0, dtype=torch.float16)
        carrier.all_reduce(tensor, "mean", CollectiveCall(1, "mean"))
        return tensor.tolist()

    assert run(gpu_carriers(2), reduce) == [[40_000.0, 40_000.0]] * 2


@pytest.mark.parametrize(("gpus", "takes"), [("ab", True), ("aa", False), ("aab", False)])
def test_replicas_that_share_a_gpu_do_without_nccl(
    gpus: str, takes: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def properties(device: int) -> Any:
        return types.SimpleNamespace(uuid=gpus[device])

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    carriers = gpu_carriers(len(gpus))
    answers = run(
        carriers, lambda carrier: carrier.takes(carrier.rank, CollectiveCall(1, "compare GPUs"))
    )
    assert answers == [takes] * len(gpus)
    assert [each.message.partition(":")[0] for each in caplog.records] == (
        [] if takes else ["2 replicas share a GPU"]
    )
