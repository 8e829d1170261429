"""Rollouts and weights: `launchpad_lite.rollouts`, and what one might take instead.

    python -m benchmarks.rollouts --rounds=3

Empty rollouts per second with 1, 4 and 16 generators; milliseconds until 4 readers on this machine
have 256 MiB of weights, beside one copy of these.
"""

import json
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

from benchmarks.environments import ROOT, Peer, install_all, machine, options
from benchmarks.processes import adopt_orphans, end_orphans
from benchmarks.report import versions

PEERS = (
    Peer(
        "rollouts",
        "`launchpad_lite.rollouts`",
        ("--editable", str(ROOT), "numpy"),
        "launchpad-lite",
    ),
    Peer(
        "ray_rollouts", "Ray", ("ray", "numpy"), "ray", environment={"RAY_USAGE_STATS_ENABLED": "0"}
    ),
)
_CASES = [("rollouts", number, 5.0) for number in (1, 4, 16)] + [("weights", 4, 256.0)]
_TIMEOUT_S = 180.0


def copy_s(mib: int) -> float:
    """Returns the median of the seconds that one copy takes, into memory that is there."""
    import numpy as np

    source, target = np.ones(mib << 20, np.uint8), np.ones(mib << 20, np.uint8)
    times = []
    for _ in range(7):
        began = time.perf_counter()
        target[:] = source
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def main() -> None:
    """Measures and prints."""
    chosen = options(__doc__, PEERS, workers=0).parse_args()
    adopt_orphans()
    installed, absent = install_all([peer for peer in PEERS if peer.name in chosen.peers])
    found: dict[tuple[str, str], list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="rollouts-") as folder:
        for _ in range(chosen.rounds):
            for what, number, amount in _CASES:
                for one in installed:
                    result = Path(folder, "result")
                    command = [str(one.interpreter), str(one.peer.script), what]
                    command += [str(number), str(amount), str(result)]
                    subprocess.run(
                        command,
                        check=True,
                        timeout=_TIMEOUT_S,
                        env=one.variables,
                        capture_output=True,
                    )
                    end_orphans()
                    value = float(json.loads(result.read_text()))
                    found.setdefault((one.peer.name, f"{what} {number}"), []).append(value)
                    print(one.peer.name, what, number, value, flush=True)
    print(f"Medians of {chosen.rounds} rounds. {machine()}.\n\n{versions(installed)}\n{absent}")
    for (name, case), values in found.items():
        median = statistics.median(values)
        text = f"{1000 * median:.0f} ms" if "weights" in case else f"{median:,.0f}/s"
        print(f"{name:<14} {case:<12} {text}")
    print(f"one copy of 256 MiB: {1000 * copy_s(256):.0f} ms")


if __name__ == "__main__":
    main()
