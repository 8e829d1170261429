"""Runs the program and shows its result: `python -m examples.replay.launch`."""

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

import launchpad_lite as lp
from examples.replay.program import Result, make_program


def main() -> None:
    """Learns to balance a pole, from a replay buffer in Reverb."""
    parser = argparse.ArgumentParser(description=main.__doc__, allow_abbrev=False)
    parser.add_argument("--launcher", default="local_mp", help="local_mp (default) or local_mt")
    parser.add_argument("--actors", type=int, default=2, help="default 2")
    parser.add_argument("--ratio", type=float, default=16.0, help="samples per insert (default 16)")
    parser.add_argument("--target", type=float, default=150.0, help="mean return (default 150)")
    parser.add_argument("--seed", type=int, default=1, help="default 1")
    parser.add_argument("--output", type=Path, help="where the result is written as JSON")
    options = parser.parse_args()
    # TensorFlow, which comes with Reverb, tells of GPUs that it does not find.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

    with tempfile.TemporaryDirectory() as folder:
        output = options.output or Path(folder) / "result.json"
        program = make_program(
            options.actors, options.ratio, options.target, seed=options.seed, output=output
        )
        start = time.monotonic()
        running = lp.launch(program, options.launcher)
        print(f"{options.actors} actors, {options.ratio:g} samples per insert asked for")
        running.wait()
        seconds = time.monotonic() - start
        result = Result(**json.loads(output.read_text(encoding="utf-8")))

    print(f"\nmean return {result.mean_return:.1f} after {seconds:.1f} s")
    print(f"{result.samples:,} samples of {result.inserts:,} inserts")
    print(f"{result.ratio:.2f} samples per insert, {result.asked_ratio:g} asked for")
    print(f"Logs: {running.log_dir or 'none, as all nodes were threads of this process'}")


if __name__ == "__main__":
    main()
