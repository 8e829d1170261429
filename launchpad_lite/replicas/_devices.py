"""The devices of a replica: of PyTorch or JAX, or the CPU in their place."""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def count() -> int:
    """Returns how many devices there are here: GPUs, or cores where there is none."""
    return _gpus() or len(os.sched_getaffinity(0))


def _gpus() -> int:
    torch = sys.modules.get("torch")
    if torch is not None:
        return int(torch.cuda.device_count())
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([each for each in visible.split(",") if each.strip() not in ("", "-1")])
    with contextlib.suppress(OSError):
        return sum(each.name[6:].isdigit() for each in Path("/dev").glob("nvidia*"))
    return 0


@contextlib.contextmanager
def on_device(index: int) -> Iterator[Any]:
    """Has tensors and arrays be made on a device of this machine in a block; gives the device.

    Without PyTorch and JAX there is none, and the block gives None.
    """
    torch, jax = sys.modules.get("torch"), sys.modules.get("jax")
    if torch is not None:
        # With GPUs: not yet run on a machine that has some.
        name = f"cuda:{index % torch.cuda.device_count()}" if torch.cuda.is_available() else "cpu"
        device = torch.device(name)
        with device:
            yield device
    elif jax is not None:
        devices = jax.local_devices()
        with jax.default_device(devices[index % len(devices)]):
            yield devices[index % len(devices)]
    else:
        yield None
