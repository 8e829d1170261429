"""Runs the program and shows its result: `python -m examples.map_reduce.launch`."""

import argparse
import json
import tempfile
import time
from pathlib import Path

import launchpad_lite as lp
from examples.map_reduce.program import make_program, table


def main() -> None:
    """Counts words in the Python standard library."""
    parser = argparse.ArgumentParser(description=main.__doc__, allow_abbrev=False)
    parser.add_argument("--launcher", default="local_mp", help="local_mp (default) or local_mt")
    parser.add_argument("--files", type=int, default=24, help="one mapper each (default 24)")
    parser.add_argument("--reducers", type=int, default=3, help="default 3")
    options = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "counts.json"
        program = make_program(options.files, options.reducers, output)
        start = time.monotonic()
        running = lp.launch(program, options.launcher)
        print(f"{options.files} mappers, {options.reducers} reducers ({running.plan.where})")
        running.wait()
        seconds = time.monotonic() - start
        counts: dict[str, int] = json.loads(output.read_text(encoding="utf-8"))

    print(f"\n{table(counts)}\n")
    print(f"{sum(counts.values()):,} words, {len(counts):,} different, in {seconds:.1f} s")
    print(f"Logs: {running.log_dir or 'none, as all nodes were threads of this process'}")


if __name__ == "__main__":
    main()
