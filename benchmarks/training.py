"""Steps of image classification with replicas, beside PyTorch's DistributedDataParallel with gloo.

    python -m benchmarks.training --rounds=5 --write
    python -m benchmarks.training --rounds=5 --hosts --write

With `--hosts` there are two replicas, each in a network namespace of its own, as on hosts; ours use TLS.

Both train the network of examples/image_classification with 64 images a replica, on one thread each,
and gather the loss of all replicas after each step. They take turns.
"""

import contextlib
import json
import os
import statistics
import subprocess
from collections.abc import Sequence

from benchmarks import page
from benchmarks.environments import ROOT, Installed, Peer, install_all, machine, options
from benchmarks.namespaces import Namespaces
from benchmarks.report import versions

_OURS = ("--editable", f"{ROOT}[ssh,torch]", "numpy", "scikit-learn")
PEERS = (
    Peer("replica_training", "replicas", _OURS, "launchpad-lite"),
    Peer("ddp_training", "PyTorch DDP, gloo", _OURS, "torch"),
)
_TIMEOUT_S = 300.0
#: The command that runs another one on each host, by its address; empty: this machine.
Hosts = dict[str, Sequence[str]]


def measure(one: Installed, number: int, steps: int, hosts: Hosts) -> tuple[float, float]:
    """Returns seconds until all have made their first step, and the median of a step.

    Raises:
        subprocess.CalledProcessError: It has failed.
    """
    arguments = [str(number), str(steps), json.dumps(hosts)]
    launching = next(iter(hosts.values()), ())  # the hosts reach each other only
    done = subprocess.run(
        [*launching, str(one.interpreter), str(one.peer.script), *arguments],
        env={**os.environ, **one.variables, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        timeout=_TIMEOUT_S,
        check=True,
    )
    found = json.loads(done.stdout.splitlines()[-1])
    return max(first for first, _ in found), statistics.median(found[0][1][len(found[0][1]) // 4 :])


def table(
    installed: Sequence[Installed], numbers: Sequence[int], steps: int, rounds: int, hosts: Hosts
) -> tuple[str, str]:
    """Returns tables of steps, and of starts, as Markdown."""
    header = f"| | {' | '.join(f'{number} replicas' for number in numbers)} |"
    rows: dict[str, list[list[str]]] = {one.peer.title: [[], []] for one in installed}
    for number in numbers:
        results: dict[str, list[tuple[float, float]]] = {one.peer.title: [] for one in installed}
        for _ in range(rounds):
            for one in installed:
                results[one.peer.title].append(measure(one, number, steps, hosts))
        ours = results[installed[0].peer.title]
        for title, found in results.items():
            for part, (unit, factor) in enumerate((("s", 1.0), ("ms", 1000.0))):
                median = statistics.median(each[part] for each in found)
                ratio = statistics.median(
                    each[part] / own[part] for each, own in zip(found, ours, strict=True)
                )
                rows[title][part].append(f"{median * factor:.2f} {unit} ({ratio:.2f})")
    lines = [header, "| --- |" + " --: |" * len(numbers)]
    starts, took = (
        "\n".join(
            [*lines, *(f"| {title} | {' | '.join(row[part])} |" for title, row in rows.items())]
        )
        for part in (0, 1)
    )
    return took, starts


def main() -> None:
    """Measures, prints, and writes if wanted."""
    parser = options(__doc__, PEERS, workers=2)
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--hosts", action="store_true", help="two, as root, instead of one machine")
    chosen = parser.parse_args()
    installed, _ = install_all([peer for peer in PEERS if peer.name in chosen.peers])
    with contextlib.ExitStack() as stack:
        hosts: Hosts = {}
        if chosen.hosts:
            hosts = dict(stack.enter_context(contextlib.closing(Namespaces())).hosts)
            chosen.replicas = [len(hosts)]
        took, starts = table(installed, chosen.replicas, chosen.steps, chosen.rounds, hosts)
    text = "\n\n".join(
        [
            f"Medians of {chosen.rounds} rounds; in brackets: times the first row. {machine()}.",
            versions(installed).rstrip(),
            f"A step:\n\n{took}",
            f"From the launch until all replicas have made a step:\n\n{starts}",
        ]
    )
    print(text)
    if chosen.write:
        page.put("training_of_hosts" if chosen.hosts else "training", text)


if __name__ == "__main__":
    main()
