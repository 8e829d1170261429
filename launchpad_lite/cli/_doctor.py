"""`python -m launchpad_lite.launch doctor`: checks this machine, and hosts, and says what would fail."""

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping

from launchpad_lite._version import __version__
from launchpad_lite.cli._machine_checks import machine_checks
from launchpad_lite.launching import Finding, Launcher, get_launcher, installed_launchers
from launchpad_lite.parts.escapes import shown

#: Seconds that all checks have together; they run side by side.
_LIMIT_S = 30.0
Check = Callable[[], Finding]


def diagnose(launcher: Launcher | None, *, as_json: bool) -> int:
    """Prints what checks find; returns the exit code: 1 if one fails.

    A `launcher` that is named must work; without it, those that are installed may.
    """
    own = _checks_of_all() if launcher is None else launcher.checks()
    findings: list[dict[str, str]] = []
    for name, found in run_checks({**machine_checks(), **own}, _LIMIT_S):
        changed = {"fail": "warn"} if launcher is None else {"none": "fail"}
        verdict = changed.get(found.verdict, found.verdict) if name in own else found.verdict
        finding = found._replace(verdict=verdict)
        findings.append({"check": name, **finding._asdict()})
        line = f"{finding.verdict:<4}  {name}: {'. '.join(filter(None, finding[1:]))}"
        if not as_json:
            print(shown(" | ".join(line.splitlines())), flush=True)  # noqa: T201
    fails = any(each["verdict"] == "fail" for each in findings)
    if as_json:
        whole = {"format": 1, "version": __version__, "ok": not fails, "findings": findings}
        print(json.dumps(whole, indent=2))  # noqa: T201
    return int(fails)


def _checks_of_all() -> Mapping[str, Check]:
    """Returns the checks of all launchers; those of one name are the same."""
    checks: dict[str, Check] = {}
    for name in installed_launchers():
        try:
            checks.update(get_launcher(name).checks())
        except Exception as error:  # noqa: BLE001 - code of others, some of which needs options
            remedy = f"Name it, with its options: --launcher={name} doctor"
            checks[name] = Finding("none", repr(error), remedy)._replace
    return checks


def run_checks(checks: Mapping[str, Check], limit_s: float) -> Iterator[tuple[str, Finding]]:
    """Runs all checks at once; yields what each has found, in their order, within a limit for all."""
    give_up_at = time.monotonic() + limit_s
    found: dict[str, Finding] = {}

    def run(name: str) -> None:
        try:
            found[name] = checks[name]()
        except Exception as error:  # noqa: BLE001 - it is told, and the others go on
            found[name] = Finding("fail", str(error) or repr(error))

    # Daemons: one that hangs must not keep the process.
    threads = {name: threading.Thread(target=run, args=(name,), daemon=True) for name in checks}
    for name, thread in threads.items():
        try:
            thread.start()
        except RuntimeError as error:
            found[name] = Finding("fail", str(error), "Raise `ulimit -u`, or pids of the container")
    for name, thread in threads.items():
        if thread.ident is not None:
            thread.join(max(0.0, give_up_at - time.monotonic()))
        yield name, found.get(name, Finding("fail", f"no answer within {limit_s:g} s"))
