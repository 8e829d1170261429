"""The devices of a replica: of PyTorch or JAX, or the CPU in their place."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import launchpad_lite as lp
from launchpad_lite.launching import loaded_module, visible_devices
from launchpad_lite.replicas.errors import ReplicaError


def count() -> int:
    torch = loaded_module("torch")
    gpus = len(visible_devices()[0]) if torch is None else int(torch.cuda.device_count())
    return gpus or len(os.sched_getaffinity(0))


@contextlib.contextmanager
def on_device(index: int) -> Iterator[Any]:
    """Makes a device of this machine the default in a block, of tensors and arrays; gives it.

    Without PyTorch and JAX there is none, and the block gives None.
    """
    torch, jax = loaded_module("torch"), loaded_module("jax")
    if torch is not None:
        # The case with GPUs was not run yet.
        name = f"cuda:{index % torch.cuda.device_count()}" if torch.cuda.is_available() else "cpu"
        device = torch.device(name)
        with device:
            yield device
    elif jax is not None:
        devices = jax.local_devices()
        with on_device_of_jax(devices[index % len(devices)]) as device:
            yield device
    else:
        yield None


def ask_jax_for(count: int) -> None:
    """Makes JAX use as many virtual CPU devices, if it has no devices yet."""
    try:
        import jax
    except ImportError:
        raise lp.MissingExtraError(
            "TpuReplicator needs JAX: pip install 'launchpad-lite[jax]' (with Python 3.11 or newer)"
        ) from None
    if jax.config.jax_num_cpu_devices < count:
        with contextlib.suppress(RuntimeError):  # it has its devices already
            jax.config.update("jax_num_cpu_devices", count)


def of_jax(count: int) -> "list[Any]":
    """Returns devices of JAX in this process: accelerators, or virtual CPU devices."""
    ask_jax_for(count)
    import jax

    devices: list[Any] = jax.local_devices()
    if len(devices) >= count:
        return devices[:count]
    platform = devices[0].platform
    what = f"JAX has {len(devices)} {platform} device(s) in this process, and {count} are needed"
    if platform != "cpu":
        raise ReplicaError(
            f"{what}: ask for fewer, or set JAX_PLATFORMS=cpu for virtual CPU devices"
        )
    raise ReplicaError(
        f"{what}. It was used in this process before the replicas began. Use it in the replicas only, "
        f"or set JAX_NUM_CPU_DEVICES={count} before"
    )


@contextlib.contextmanager
def on_device_of_jax(device: Any) -> Iterator[Any]:
    """Makes a device of JAX the default for arrays in a block; gives the device."""
    import jax

    with jax.default_device(device):
        yield device


def like_here() -> "contextlib.AbstractContextManager[Any]":
    """Returns a block in which another thread makes arrays of JAX on the device of this one."""
    jax = loaded_module("jax")
    return jax.default_device(jax.config.jax_default_device) if jax else contextlib.nullcontext()
