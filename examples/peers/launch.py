"""Gradient descent on peers, without a server: `python -m examples.peers.launch`."""

import argparse
import sys
import time

import launchpad_lite as lp
from examples.peers.program import make_program
from launchpad_lite import engines


def main() -> int:
    """Fits a matrix on peers, each of which has some columns of it, and data of its own."""
    parser = argparse.ArgumentParser(description=main.__doc__, allow_abbrev=False)
    parser.add_argument("--launcher", default="local_mp", help="local_mp (default), local_mt, ..")
    parser.add_argument("--peers", type=int, default=20, help="default 20")
    parser.add_argument("--steps", type=int, default=100, help="of each peer, default 100")
    parser.add_argument(
        "--sample",
        type=int,
        default=3,
        help="of how many others each peer observes the steps (PSP), default 3; 0: no peer waits",
    )
    parser.add_argument("--staleness", type=int, default=0, help="in steps, default 0")
    parser.add_argument(
        "--slow", type=float, default=0.0, help="seconds that the first peer adds to each step"
    )
    options = parser.parse_args()

    barrier = engines.PSP(options.sample, options.staleness)
    program = make_program(options.peers, options.steps, barrier, options.slow)
    start = time.monotonic()
    lp.launch(program, options.launcher).wait()
    print(f"{options.peers} peers, {barrier}: {time.monotonic() - start:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
