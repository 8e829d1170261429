"""How this suite runs: its tiers, a folder of its own for each process, a short list of skips.

Each test belongs to one tier. A test without a mark is `fast`; `bed`, `slow` and `long` are marked.
`serial` says besides that a test measures time or needs the whole machine: `make` runs those alone.
No fast test is.
"""

import collections
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path

import hypothesis
import psutil
import pytest

TIERS = ("fast", "bed", "slow", "long")
FAST_S = 2
"""No fast test may take longer, fixtures included, on a machine that does nothing else."""
ATTEMPTS = 3
"""How often a late test is measured again: one time within the limit shows that it can be."""
MOST_AGAIN = 50
"""How many late tests are measured again; where more are late, the slowest speak for all."""
BUSY = 0.1
"""A machine does nothing else if other programs use a smaller share of its cores."""

#: Fixtures that build a host engine once for all tests: those of a module go to one process.
_ENGINES = ("kubernetes_cluster", "slurm_cluster", "ssh_hosts")
#: The file that gets their names, where tests that took too long are measured again.
_ALONE = "LAUNCHPAD_TESTS_ALONE"
_QUARTERS = 4

# They assert as tests do.
pytest.register_assert_rewrite("tests.launchers.host_contract", "tests.launchers.host_engines")

hypothesis.settings.register_profile(
    "tests", deadline=None, derandomize=os.environ.get("CI") == "true", print_blob=True
)
hypothesis.settings.load_profile("tests")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--quarter",
        type=int,
        choices=range(_QUARTERS),
        help="run one quarter of the tests that are selected; four quarters are all of them",
    )


def pytest_configure(config: pytest.Config) -> None:
    _restore_signals()
    # Several tests at a time leave no core for threads of numpy, which wait in busy loops.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    folder = tempfile.mkdtemp(prefix="launchpad-tests-")
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    os.environ["TMPDIR"] = folder
    tempfile.tempdir = None  # look at TMPDIR again
    # Runs without a name would go there instead.
    os.environ.pop("XDG_STATE_HOME", None)


def _restore_signals() -> None:
    """Undoes what nohup and background jobs of shells ignore.

    Programs that tests start would inherit an ignored signal; they do not inherit a handler.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda *_: None)


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        tiers = {mark.name for mark in item.iter_markers()}.intersection(TIERS)
        if len(tiers) > 1:
            raise pytest.UsageError(f"{item.nodeid} has more than one tier: {sorted(tiers)}")
        if not tiers:
            if item.get_closest_marker("serial"):
                raise pytest.UsageError(f"{item.nodeid} is serial: give it another tier than fast")
            item.add_marker("fast")
        for engine in _ENGINES:
            if engine in getattr(item, "fixturenames", ()):
                module = item.nodeid.partition("::")[0]
                item.add_marker(pytest.mark.xdist_group(f"{engine} {module}"))
    if (quarter := config.getoption("--quarter")) is not None:
        config.hook.pytest_deselected(items=[each for each in items if _quarter(each) != quarter])
        items[:] = [each for each in items if _quarter(each) == quarter]


def _quarter(item: pytest.Item) -> int:
    return zlib.crc32(item.nodeid.encode()) % _QUARTERS


class _Durations:
    """Fails the run when a fast test takes too long."""

    def __init__(self) -> None:
        self._seconds: collections.Counter[str] = collections.Counter()
        self._report = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if "fast" in report.keywords:
            self._seconds[report.nodeid] += report.duration

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        file = os.environ.get(_ALONE)
        # Beside others each takes about twice as long, on two cores.
        limit_s = FAST_S if file else 2 * FAST_S
        late = [test for test, seconds in self._seconds.items() if seconds > limit_s]
        if not late or session.exitstatus != pytest.ExitCode.OK:
            return
        if file:
            Path(file).write_text("\n".join(late), encoding="utf-8")
            self._report = "\n".join(f"{self._seconds[test]:.1f} s {test}" for test in late)
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
            return
        if len(late) > MOST_AGAIN:
            self._report = f"{len(late)} were late; the slowest {MOST_AGAIN} were measured again.\n"
            late = sorted(late, key=self._seconds.__getitem__)[-MOST_AGAIN:]
        # Others ran beside them. What counts is how long they take alone.
        with _Bystanders() as bystanders:
            for _ in range(ATTEMPTS):
                again, late = _run_alone(late, session.config.rootpath)
                if not late:
                    break
        if not again.returncode:
            return
        if late and bystanders.share > BUSY:
            self._report += (
                f"{len(late)} were late, but other programs used {bystanders.share:.0%} of the "
                "machine: it is not known whether they take too long."
            )
            return
        self._report += f"{again.stdout}{again.stderr}"
        if late:
            self._report += "\nMake them faster, or mark them slow."
        session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._report:
            terminalreporter.section(f"fast tests that take more than {FAST_S} s")
            terminalreporter.line(self._report)


def _run_alone(
    tests: list[str], folder: Path
) -> "tuple[subprocess.CompletedProcess[str], list[str]]":
    """Runs tests one by one; returns how that ended, and which of them were late if none failed."""
    file = Path(tempfile.mkdtemp()) / "late"
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n0", *tests],
        env={**os.environ, _ALONE: str(file)},
        cwd=folder,
        capture_output=True,
        text=True,
    )
    return ended, file.read_text(encoding="utf-8").split("\n") if file.exists() else []


class _Bystanders:
    """Measures which share of the machine's cores programs use that are not ours, in a block."""

    share = 0.0

    def __enter__(self) -> "_Bystanders":
        self._before = self._look()
        return self

    def __exit__(self, *exc: object) -> None:
        all_s, idle_s, ours_s = (
            now - before for now, before in zip(self._look(), self._before, strict=True)
        )
        self.share = (all_s - idle_s - ours_s) / all_s

    @staticmethod
    def _look() -> tuple[float, float, float]:
        machine = psutil.cpu_times()
        ours = resource.getrusage(resource.RUSAGE_CHILDREN)
        waiting_s = machine.idle + getattr(machine, "iowait", 0.0)
        return sum(machine[:8]), waiting_s, ours.ru_utime + ours.ru_stime


def pytest_sessionstart(session: pytest.Session) -> None:
    if not hasattr(session.config, "workerinput"):  # the process that hears of all tests
        session.config.pluginmanager.register(_Durations())


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = collections.Counter(report.longrepr[2] for report in skipped)
    for reason, count in reasons.most_common():
        terminalreporter.line(f"{count} {reason}")
