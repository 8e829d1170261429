"""How long programs in pods take to start, to come back, and to stop.

    python -m benchmarks.pods --rounds=5 --write

Needs Linux, root and podman: the cluster is that of the tests, whose API server is a fake and whose
pods are real containers of this machine. So the time is that of containers and of our programs; that
of a real scheduler and kubelet, and of pulling images, comes on top. Printed are medians. With
`--write` the table goes to docs/benchmarks.md.
"""

import argparse
import os
import statistics
import time
from pathlib import Path
from typing import Any

import courier
import launchpad_lite as lp
from benchmarks import page
from launchpad_lite.testing import poll_until

_LIMIT_S = 120.0
_KINDS = ("Job", "Service", "Secret", "NetworkPolicy")


class _Echo:
    @courier.idempotent
    def ping(self) -> int:
        return lp.restart_count()


def _watch(echoes: list[Any]) -> None:
    """Prints when all have answered, and how each restart was felt."""
    for future in [echo.futures.ping() for echo in echoes]:
        future.result()
    print(f"answered {time.time()}", flush=True)
    first = echoes[0]
    seen = 0
    while not lp.wait_for_stop(0.02):
        count = first.ping()
        if count != seen:
            seen = count
            print(f"restarted {time.time()}", flush=True)


def _program(count: int) -> lp.Program:
    program = lp.Program("pods")
    with program.group("echo"):
        handles = [program.add_node(lp.CourierNode(_Echo)) for _ in range(count)]
    program.add_node(lp.PyNode(_watch, handles), label="watch")
    return program


def _said(log: Path, word: str) -> float | None:
    for line in log.read_text().splitlines() if log.exists() else ():
        if line.startswith(f"{word} "):
            return float(line.split()[1])
    return None


def _await(log: Path, word: str) -> float:
    poll_until(lambda: _said(log, word) is not None, _LIMIT_S)
    return _said(log, word) or 0.0


def measure(cluster: Any, image: str, count: int, rounds: int) -> str:
    """Measures a program of so many servers and one caller; returns a table."""
    starts, stops, comebacks = [], [], []
    objects: dict[str, int] = {}
    for _ in range(rounds):
        started_at = time.time()
        running = lp.launch(
            _program(count), "kubernetes", image=image, restart={"echo": "on_failure"}, notice_s=5
        )
        assert running.log_dir is not None
        log = running.log_dir / "watch" / "0.log"
        starts.append(_await(log, "answered") - started_at)
        objects = {kind: len(cluster.objects(kind)) for kind in _KINDS}
        (pod,) = (name for name in _names(cluster) if "-echo-0-" in name)
        killed_at = time.time()
        cluster.kill_container(pod)
        comebacks.append(_await(log, "restarted") - killed_at)
        started_at = time.time()
        running.stop()
        stops.append(time.time() - started_at)
    counted = ", ".join(f"{number} {kind}{'s' * (number > 1)}" for kind, number in objects.items())
    rows = {
        f"launch until all {count} servers have answered": starts,
        "a pod is killed, until its node answers from a new one": comebacks,
        "stop until nothing is left in the cluster": stops,
    }
    lines = ["| | median | from | to |", "| --- | --: | --: | --: |"]
    lines += [
        f"| {what} | {statistics.median(times):.1f} s | {min(times):.1f} | {max(times):.1f} |"
        for what, times in rows.items()
    ]
    return f"{count + 1} nodes in {count + 2} pods: {counted}.\n\n" + "\n".join(lines) + "\n"


def _names(cluster: Any) -> list[str]:
    return [pod["metadata"]["name"] for pod in cluster.pods()]


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--servers", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", action="store_true", help="into docs/benchmarks.md")
    options = parser.parse_args()
    from tests.beds.kubernetes.cluster import IMAGE, KubernetesCluster  # needs what tests need

    with KubernetesCluster() as cluster:
        os.environ["KUBECONFIG"] = str(cluster.kubeconfig)
        text = measure(cluster, IMAGE, options.servers, options.rounds)
    print(text)
    if options.write:
        page.put("pods", text.rstrip("\n"))


if __name__ == "__main__":
    main()
