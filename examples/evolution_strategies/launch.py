"""Runs the program and shows its result: `python -m examples.evolution_strategies.launch`."""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import launchpad_lite as lp
from examples.evolution_strategies.program import FUNCTIONS, Result, make_program, table


def main() -> int:
    """Finds the lowest point of a function with CMA-ES."""
    parser = argparse.ArgumentParser(description=main.__doc__, allow_abbrev=False)
    parser.add_argument("--launcher", default="local_mp", help="local_mp (default) or local_mt")
    parser.add_argument("--evaluators", type=int, default=8, help="default 8")
    parser.add_argument("--function", choices=FUNCTIONS, default="rosenbrock")
    parser.add_argument("--dimension", type=int, default=8, help="default 8")
    parser.add_argument("--cost", type=float, default=10.0, help="ms each (default 10)")
    parser.add_argument("--seed", type=int, default=1, help="default 1")
    options = parser.parse_args()

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
        start = time.monotonic()
        running = lp.launch(program, options.launcher)
        print(f"{options.function} with {options.evaluators} evaluators ({running.plan.where})")
        running.wait()
        seconds = time.monotonic() - start
        result = Result(**json.loads(output.read_text(encoding="utf-8")))

    print(f"\n{table(result)}\n")
    work_s = result.evaluations * options.cost / 1000
    print(f"{work_s:.1f} s of evaluations, in {seconds:.1f} s")
    print(f"Logs: {running.log_dir or 'none, as all nodes were threads of this process'}")
    return 0 if result.solved else 1


if __name__ == "__main__":
    sys.exit(main())
