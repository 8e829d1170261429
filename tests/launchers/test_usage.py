import contextlib
import gc
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

import launchpad_lite as lp
from launchers.host.usage import UsageMeter
from launchpad_lite.testing import LaunchedProgram, poll_until


@contextlib.contextmanager
def worker(code: str) -> Iterator[int]:
    """The process of a worker, which ends with its children."""
    process = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    try:
        yield process.pid
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_a_worker_that_computes_is_seen_and_one_that_has_gone_is_left_out() -> None:
    meter = UsageMeter()
    with worker("while True: pass") as pid:
        poll_until(lambda: (meter.look({"node": pid})["node"]["cpu"] or 0) > 0)
        memory_mib = psutil.Process(pid).memory_info().rss / (1 << 20)
        usage = meter.look({"node": pid})
        assert usage["node"]["memory_mib"] == pytest.approx(memory_mib, rel=0.1)
    assert meter.look({"node": pid}) == {}


def test_what_children_of_a_worker_use_counts_as_its_own() -> None:
    meter = UsageMeter()
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'while True: pass'])"
    with worker(code) as pid:
        child = poll_until(psutil.Process(pid).children)[0]
        poll_until(lambda: (meter.look({"node": pid})["node"]["cpu"] or 0) > 0.3)
        both = psutil.Process(pid).memory_info().rss + child.memory_info().rss
        usage = meter.look({"node": pid})
        assert usage["node"]["memory_mib"] == pytest.approx(both / (1 << 20), rel=0.1)


#: In place of the package nvidia-ml-py: each process has 1 MiB of the first GPU, half of it of the last; one fails.
NVML = """
import pathlib, types
class NVMLError(Exception): pass
is_up = False
def nvmlInit():
    global is_up
    is_up = True
def nvmlShutdown():
    global is_up
    is_up = False
def nvmlDeviceGetCount(): return 4
def nvmlDeviceGetHandleByIndex(index):
    if index == 2:
        raise NVMLError
    return index
def nvmlDeviceGetComputeRunningProcesses(index):
    pids = [int(each.name) for each in pathlib.Path("/proc").iterdir() if each.name.isdecimal()]
    held = (1 << 20, None, None, 1 << 19)[index]
    return [types.SimpleNamespace(pid=pid, usedGpuMemory=held) for pid in pids]
"""


@pytest.fixture
def nvml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "pynvml.py").write_text(NVML)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    return tmp_path


@pytest.mark.usefixtures("nvml")
def test_gpu_memory_of_a_worker_and_its_children_is_told_where_nvml_is() -> None:
    meter = UsageMeter()
    with worker("import subprocess; subprocess.run(['sleep', '60'])") as pid:
        poll_until(psutil.Process(pid).children)
        assert meter.look({"node": pid})["node"]["gpu_memory_mib"] == 3.0
    assert not sys.modules["pynvml"].is_up  # forked workers would inherit its open files


def test_without_nvml_none_is_told_and_nobody_looks_again(
    nvml: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (nvml / "pynvml.py").write_text("def nvmlInit(): raise OSError('no driver')")
    meter, here = UsageMeter(), {"node": os.getpid()}
    assert meter.look(here)["node"]["gpu_memory_mib"] is None
    monkeypatch.delitem(sys.modules, "pynvml")
    (nvml / "pynvml.py").write_text(NVML)
    assert meter.look(here)["node"]["gpu_memory_mib"] is None


@pytest.mark.parametrize("error", ["NVMLError", "OSError"])
def test_a_driver_that_fails_hides_no_other_numbers(nvml: Path, error: str) -> None:
    failing = NVML.replace("return 4", f"raise {error}('strange driver')")
    (nvml / "pynvml.py").write_text(failing)
    used = UsageMeter().look({"node": os.getpid()})["node"]
    assert used["gpu_memory_mib"] is None
    assert used["memory_mib"]


@pytest.mark.slow
@pytest.mark.usefixtures("nvml")
def test_gpu_memory_is_in_the_states_and_in_the_history(
    launch_program: Callable[..., LaunchedProgram],
) -> None:
    program = lp.Program("gpus")
    program.add_node(lp.PyNode(lp.wait_for_stop), label="node")
    running = launch_program(program, "test_mp").running
    poll_until(lambda: running.status()[0].gpu_memory_mib == 1.5)
    assert running.log_dir is not None
    poll_until(lambda: '"gpu_mib":1.5' in (running.log_dir / "history.jsonl").read_text())


def _collect(told: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    gc.collect()
    told.write_text(str(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before))


def test_a_collection_in_a_node_copies_little_of_what_it_shares_with_others(
    launch_program: Callable[..., LaunchedProgram], tmp_path: Path
) -> None:
    program = lp.Program("garbage")
    program.add_node(lp.PyNode(_collect, tmp_path / "faults"), label="node")
    launch_program(program, "test_mp").wait(60)
    assert int((tmp_path / "faults").read_text()) < 400  # of 1,200 pages with objects
