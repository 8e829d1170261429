"""Runs the program and shows its result: `python -m examples.inference_server.launch`.

With `--compare` it runs a second time, with batches of 1. A matrix costs next to nothing, so that
waiting for a batch does not pay; with `--cost=1`, as on an accelerator, it does.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

import launchpad_lite as lp
from examples.inference_server.program import SOLVED, Result, make_program, table


def main() -> int:
    """Balances CartPole with many actors and one policy, computed for all of them in batches."""
    parser = argparse.ArgumentParser(description=main.__doc__, allow_abbrev=False)
    parser.add_argument("--launcher", default="local_mp", help="local_mp (default) or local_mt")
    parser.add_argument("--actors", type=int, default=8, help="default 8")
    parser.add_argument("--episodes", type=int, default=1, help="of each actor (default 1)")
    parser.add_argument("--batch-size", type=int, help="at most (default: as many as actors)")
    parser.add_argument(
        "--timeout", type=float, default=2.0, help="ms that a batch is waited for (default 2)"
    )
    parser.add_argument("--cost", type=float, default=0.0, help="ms of each batch besides")
    parser.add_argument("--compare", action="store_true", help="with batches of 1, too")
    options = parser.parse_args()

    results = []
    for batch_size in [options.batch_size, 1] if options.compare else [options.batch_size]:
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder) / "result.json"
            try:
                program = make_program(
                    options.actors,
                    batch_size,
                    output,
                    episodes=options.episodes,
                    timeout_ms=options.timeout,
                    cost_ms=options.cost,
                )
            except ValueError as error:
                parser.error(str(error))
            running = lp.launch(program, options.launcher)
            print(f"{options.actors} actors ({running.plan.where})")
            running.wait()
            results.append(Result(**json.loads(output.read_text(encoding="utf-8"))))

    print(f"\n{table(results)}")
    return 0 if all(result.mean_return >= SOLVED for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
