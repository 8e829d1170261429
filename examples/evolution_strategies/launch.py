"""Runs the program and shows its result: `python -m examples.evolution_strategies.launch`.

With `--chaos=1` nodes are killed, paused and slowed down meanwhile, at random; the result is the
same.
"""

import argparse
import collections
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import launchpad_lite as lp
from examples.evolution_strategies.program import FUNCTIONS, Result, make_program, table
from launchpad_lite.launching import RunningProgram

if TYPE_CHECKING:
    from launchpad_lite.testing import Injected

RESTART = lp.RestartPolicy("on_failure", max_restarts=20, max_backoff_s=1.0)
#: Seconds of the search that are done again, at most, when the evolver is lost.
CHECKPOINT_S = 1.0


def main() -> int:
    """Finds the lowest point of a function with CMA-ES; survives the loss of any node."""
    parser = argparse.ArgumentParser(description=main.__doc__, allow_abbrev=False)
    parser.add_argument("--launcher", default="local_mp", help="local_mp (default) or local_mt")
    parser.add_argument("--evaluators", type=int, default=8, help="default 8")
    parser.add_argument("--function", choices=FUNCTIONS, default="rosenbrock")
    parser.add_argument("--dimension", type=int, default=8, help="default 8")
    parser.add_argument("--cost", type=float, default=10.0, help="ms each (default 10)")
    parser.add_argument("--seed", type=int, default=1, help="default 1")
    parser.add_argument(
        "--checkpoints", metavar="FOLDER", help="go on from what is there (default: a temporary)"
    )
    parser.add_argument("--chaos", type=int, metavar="SEED", help="hit nodes at random meanwhile")
    options = parser.parse_args()
    if options.chaos is not None and options.launcher == "local_mt":
        parser.error("--chaos kills processes; with local_mt all nodes are threads of this one")

    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "result.json"
        program = make_program(
            options.evaluators,
            options.function,
            options.dimension,
            options.seed,
            output,
            cost_ms=options.cost,
        )
        checkpoints = lp.Checkpoints(options.checkpoints or f"{folder}/checkpoints", CHECKPOINT_S)
        start = time.monotonic()
        with lp.launch(
            program, options.launcher, restart=RESTART, checkpoints={"evolver": checkpoints}
        ) as running:
            print(f"{options.function} with {options.evaluators} evaluators ({running.plan.where})")
            faults = [] if options.chaos is None else inject(running, options.chaos, output)
            ended = running.wait()
        seconds = time.monotonic() - start
        result = Result(**json.loads(output.read_text(encoding="utf-8")))

    print(f"\n{table(result)}\n")
    if options.chaos is not None:
        print(f"{survived(faults, ended)}\n")
    work_s = result.evaluations * options.cost / 1000
    print(f"{work_s:.1f} s of evaluations, in {seconds:.1f} s")
    print(f"Logs: {running.log_dir or 'none, as all nodes were threads of this process'}")
    return 0 if result.solved else 1


def inject(running: RunningProgram, seed: int, output: Path) -> "list[Injected]":
    """Lets a monkey loose on all nodes until there is a result."""
    # For tests; loaded only on demand, because it imports pytest.
    from launchpad_lite.testing import Monkey

    with Monkey(running, seed=seed, mean_interval_s=0.4, minimum_uptime_s=0.2) as monkey:
        while not output.exists() and running.result is None:
            time.sleep(0.01)
    return monkey.injected


def survived(faults: "list[Injected]", ended: lp.ProgramResult) -> str:
    """Returns as a table what happened to the nodes."""
    happened = collections.Counter(f"{fault.fault.value}s" for fault in faults)
    rows = [*sorted(happened.items()), ("restarts", len(ended.restarts))]
    return "\n".join(f"{name:<12} {number:,}" for name, number in rows)


if __name__ == "__main__":
    sys.exit(main())
