"""What `run` of replicas costs per step, beside other checkouts of this project, in one run.

    python -m benchmarks.replica_steps --rounds=3 --checkouts ../before .

Steps do nothing but what their row says. Two replicas, on two processes of one machine, where the row
says nothing else. The checkouts take turns. It needs PyTorch.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.environments import ROOT, machine
from launchpad_lite import replicas

_LOAD_S = _COMPUTE_S = 0.01
_TIMEOUT_S = 120.0
_MIB = 1 << 20


def _per_step(
    repl: replicas.Replicator, step_fn: Callable[..., Any], input_fn: Any = None, steps: int = 300
) -> float:
    """Returns the median of seconds from one step to the next."""
    at = [time.perf_counter() for _ in repl.run(step_fn, input_fn, steps=steps)]
    return statistics.median(after - before for before, after in itertools.pairwise(at[50:]))


def a_float(repl: replicas.Replicator) -> float:
    """Steps that return a number."""
    return _per_step(repl, lambda: 1.5, steps=2000)


def a_tensor(repl: replicas.Replicator) -> float:
    """Steps that return a tensor with one item."""
    import torch

    loss = torch.tensor(1.5)
    return _per_step(repl, lambda: loss, steps=1000)


def tensors(repl: replicas.Replicator) -> float:
    """Steps that return 60 tensors."""
    import torch

    values = {f"value{number}": torch.zeros(3) for number in range(60)}
    return _per_step(repl, lambda: values)


def small_batches(repl: replicas.Replicator) -> float:
    """Steps with numbers as input."""
    return _per_step(repl, float, lambda _: range(9999), steps=2000)


def shared_batches(repl: replicas.Replicator) -> float:
    """Steps with halves of a batch of 2 MiB."""
    import torch

    batch = torch.zeros((64, 2 * _MIB // 64), dtype=torch.uint8)
    return _per_step(repl, len, lambda _: itertools.repeat(batch))


def loading(repl: replicas.Replicator) -> float:
    """Steps of 10 ms whose input takes 10 ms."""

    def input_fn(index: int) -> Iterator[int]:
        while True:
            time.sleep(_LOAD_S)
            yield index

    return _per_step(repl, lambda _: time.sleep(_COMPUTE_S), input_fn, steps=100)


def checkpoints(repl: replicas.Replicator) -> float:
    """Steps of 10 ms beside checkpoints of 192 MiB; the longest one."""
    import numpy as np

    repl.keep(state=[np.zeros(64 * _MIB, np.uint8) for _ in range(3)])
    at = [time.perf_counter() for _ in repl.run(lambda: time.sleep(_COMPUTE_S), steps=500)]
    return max(after - before for before, after in itertools.pairwise(at))


_TWO = replicas.MultiWorkerReplicator(2)
CASES: dict[str, tuple[str, Callable[..., float], replicas.Replicator]] = {
    "float": ("`step_fn` returns a float", a_float, _TWO),
    "tensor": ("a tensor", a_tensor, _TWO),
    "tensors": ("60 tensors of 3 items", tensors, _TWO),
    "small": ("takes a number, returns a float", small_batches, _TWO),
    "shared": (
        "half of a batch of 2 MiB (`MultiGpu`)",
        shared_batches,
        replicas.MultiGpuReplicator(2),
    ),
    "loading": ("10 ms of loading, 10 ms of computing", loading, _TWO),
    "checkpoints": ("the longest step of 10 ms beside checkpoints of 192 MiB", checkpoints, _TWO),
}


def _measure_here(name: str) -> None:
    _, function, repl = CASES[name]
    options = {}
    if name == "checkpoints":
        import tempfile

        import launchpad_lite as lp

        folder = tempfile.mkdtemp()
        options = {"checkpoints": {"replica": lp.Checkpoints(folder, period_s=1.0)}}
    print(json.dumps(max(repl.launch(function, launch_options=options))))


def _measure_in(checkout: str, name: str) -> float:
    """Measures the code of a checkout, in a process of its own."""
    done = subprocess.run(
        [sys.executable, __file__, f"--measure={name}"],
        env={**os.environ, "PYTHONPATH": f"{checkout}:{ROOT}"},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        timeout=_TIMEOUT_S,
        check=True,
    )
    return float(done.stdout.splitlines()[-1])


def main() -> None:
    """Measures, and prints a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--checkouts", nargs="+", default=[str(ROOT)])
    parser.add_argument("--measure", choices=CASES, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.measure:
        _measure_here(chosen.measure)
        return
    print(f"A step, medians of {chosen.rounds} rounds. {machine()}.\n", flush=True)
    checkouts = [os.path.realpath(each) for each in chosen.checkouts]
    print(f"| | {' | '.join(chosen.checkouts)} |\n| --- |" + " --: |" * len(checkouts), flush=True)
    for name in chosen.cases:
        found: dict[str, list[float]] = {each: [] for each in checkouts}
        for _ in range(chosen.rounds):
            for each in checkouts:
                found[each].append(_measure_in(each, name))
        cells = [f"{statistics.median(found[each]) * 1e6:,.0f} µs" for each in checkouts]
        print(f"| {CASES[name][0]} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
