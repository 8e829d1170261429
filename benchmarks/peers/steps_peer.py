"""courier with counters inside: what `python -m benchmarks.steps` runs.

The environment variable COUNTED names what is counted in this process.
"""

import collections
import ctypes
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import harness

#: Counts in PYMEM_DOMAIN_OBJ. It does without Python.h, which is not always there.
_ALLOCATOR = """
struct { void *ctx, *(*malloc)(void *, unsigned long), *others[3]; } plain, counting;
void PyMem_GetAllocator(int, void *), PyMem_SetAllocator(int, void *);
long made;
static void *count(void *ctx, unsigned long size) { made++; return plain.malloc(ctx, size); }
void install(void) {
  PyMem_GetAllocator(2, &plain), counting = plain;
  counting.malloc = count, PyMem_SetAllocator(2, &counting);
}
"""
_counts: dict[str, int] = collections.Counter()


class _Lock:
    def __init__(self, lock: Any) -> None:
        self._lock = lock

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lock, name)

    def acquire(self, *args: Any, **kwargs: Any) -> bool:
        _counts["locks taken"] += 1
        return bool(self._lock.acquire(*args, **kwargs))

    __enter__ = acquire

    def __exit__(self, *exc: object) -> None:
        self._lock.release()


def _profile(frame: Any, event: str, argument: Any) -> None:
    if event == "call":
        code = frame.f_code
        _counts["functions of Python entered"] += 1
        _counts[f"- {Path(code.co_filename).stem}.{code.co_name}:{code.co_firstlineno}"] += 1
    elif event == "c_call":
        _counts["functions in C called"] += 1
        _counts[f"- in C: {argument.__qualname__}"] += 1


def _load_allocator() -> ctypes.CDLL:
    with tempfile.TemporaryDirectory() as folder:
        command = ["cc", "-shared", "-fPIC", "-o", f"{folder}/counting.so", "-xc", "-"]
        subprocess.run(command, input=_ALLOCATOR, text=True, check=True)
        return ctypes.CDLL(f"{folder}/counting.so")


class _Counted(harness.Client):
    def count(self) -> dict[str, int]:
        """Returns what was counted in this process until now."""
        if _counted == "objects":
            _counts["objects allocated"] = ctypes.c_long.in_dll(_allocator, "made").value
        elif _counted == "CPU":
            _counts["CPU (µs)"] = time.process_time_ns() // 1000
        return dict(_counts)


if __name__ == "__main__":
    _counted = os.environ["COUNTED"]
    if _counted == "functions":
        threading.setprofile(_profile)
        sys.setprofile(_profile)
    elif _counted == "locks":
        for _name in ("Lock", "RLock", "_allocate_lock"):  # conditions and queues use these
            _make = getattr(threading, _name)
            setattr(threading, _name, lambda make=_make: _Lock(make()))
    elif _counted == "objects":
        _allocator = _load_allocator()
        _allocator.install()
    from courier_peer import CourierPeer  # only now: its locks and threads are to be counted

    harness.main(CourierPeer(), _Counted)
