"""The device of a worker: one that no other worker of its search uses, or a part of one."""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from launchpad_lite.launching import VISIBLE_DEVICES, visible_devices
from launchpad_lite.search._helping import LOST
from launchpad_lite.search._presence import Presence
from launchpad_lite.search._timing import Timing
from launchpad_lite.search.errors import SearchError


@dataclass(frozen=True)
class DeviceWish:
    """What a worker needs.

    Attributes:
        share: Which part of a device.
        devices: Those that it may use; None: all that this process may see.
    """

    share: float = 1.0
    devices: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ValueError(f"a worker uses a part of one device, up to 1, not {self.share:g}")


def machine_here() -> str:
    """Returns what names this machine: its name for people, and what tells it from its namesakes."""
    boot = ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{socket.gethostname()}/{boot}"


@contextlib.contextmanager
def held_device(
    presence: Presence, wish: DeviceWish | None, timing: Timing, stop: threading.Event
) -> Iterator[None]:
    """Has this process see only the device that its worker gets, in a block.

    It gets none if it wants none, or is to end before there is one.

    Raises:
        SearchError: There is none, or another worker of this process has one.
    """
    device = None if wish is None else _claimed(presence, wish, timing, stop)
    if device is None:
        yield
        return
    if not _in_use.acquire(blocking=False):
        raise SearchError(
            f"{presence.member.who.name}: another worker of this process uses a device, and "
            f"{VISIBLE_DEVICES} is the same for both; use a launcher that starts processes"
        )
    before = os.environ.get(VISIBLE_DEVICES)
    os.environ[VISIBLE_DEVICES] = device
    try:
        yield
    finally:
        if before is None:
            del os.environ[VISIBLE_DEVICES]
        else:
            os.environ[VISIBLE_DEVICES] = before
        _in_use.release()


#: Held while a worker of this process uses a device.
_in_use = threading.Lock()


def _claimed(
    presence: Presence, wish: DeviceWish, timing: Timing, stop: threading.Event
) -> str | None:
    devices = wish.devices
    if devices is None:
        devices, shown_by = visible_devices()
        if not devices:
            raise SearchError(
                f"{presence.member.who.name}: device_share={wish.share:g} needs a device, and "
                f"{shown_by} none"
            )
    # So long the name server takes lost workers for living ones, and their devices for used.
    give_up_at = time.monotonic() + timing.silence_s + 2 * timing.beat_s
    while not stop.is_set() and not presence.view.is_closed:
        presence.beat()
        try:
            device = presence.claim(machine_here(), devices, wish.share)
        except LOST:
            device = None
        except SearchError:
            if time.monotonic() > give_up_at:
                raise
            device = None
        if device is not None:
            return device
        stop.wait(timing.beat_s)
    return None
