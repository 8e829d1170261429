"""How this suite runs: its tiers, a folder of its own for each process, a short list of skips.

Each test belongs to one tier. A test without a mark is `fast`; `bed`, `slow` and `long` are marked.
`serial` says besides that a test measures time or needs the whole machine: `make` runs those alone.
No fast test is.
"""

import collections
import os
import shutil
import signal
import tempfile
import zlib

import hypothesis
import pytest

TIERS = ("fast", "bed", "slow", "long")
LATE_S = 4.0
"""How long a fast test may take, fixtures included, beside the others. Alone that is about 2 s."""

#: Fixtures that build a host engine, or a release, once for all tests: those of a module go to one process.
_ENGINES = ("kubernetes_cluster", "released", "slurm_cluster", "ssh_hosts")
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


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    _list_late(terminalreporter)
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = collections.Counter(report.longrepr[2] for report in skipped)
    for reason, count in reasons.most_common():
        terminalreporter.line(f"{count} {reason}")


def _list_late(terminalreporter: pytest.TerminalReporter) -> None:
    """Lists fast tests that take long. It fails no run: machines differ, and do other work too."""
    seconds: collections.Counter[str] = collections.Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport) and "fast" in report.keywords:
                seconds[report.nodeid] += report.duration
    late = [each for each in seconds.most_common() if each[1] > LATE_S]
    if late:
        terminalreporter.section(f"fast tests that took more than {LATE_S:g} s: better slow ones?")
    for test, taken_s in late:
        terminalreporter.line(f"{taken_s:.1f} s {test}")
