"""Counts words, and finds clusters, on the engine: `python -m examples.datasets.launch`."""

import argparse
import sys
import time

from examples.datasets.program import blobs, count_words, k_means, library
from launchpad_lite import engines


def main() -> int:
    """Counts the words of text files, then finds clusters of points, with the same workers."""
    parser = argparse.ArgumentParser(description=main.__doc__, allow_abbrev=False)
    parser.add_argument("--launcher", default="local_mp", help="local_mp (default), local_mt, ..")
    parser.add_argument("--workers", type=int, default=2, help="default 2")
    parser.add_argument("--files", default=library(), help="default: those of Python's library")
    parser.add_argument("--points", type=int, default=200_000, help="default 200,000")
    parser.add_argument("--clusters", type=int, default=8, help="default 8")
    parser.add_argument("--seed", type=int, default=2, help="default 2")
    options = parser.parse_args()

    points, _ = blobs(options.clusters, options.points, 4, options.seed)
    with engines.MapReduce(options.workers, launcher=options.launcher) as mr:
        start = time.monotonic()
        counts = count_words(mr, options.files)
        seconds = time.monotonic() - start
        for word, count in counts[:10]:
            print(f"{count:10,}  {word}")
        print(f"{len(counts):,} words of {options.files} in {seconds:.1f} s\n")
        start = time.monotonic()
        _, inertia = k_means(mr, points, options.clusters, 10)
        seconds = time.monotonic() - start
        print(f"inertia: {inertia[0]:,.0f} at first, {inertia[-1]:,.0f} after 10 iterations")
        print(f"{len(points):,} points in {options.clusters} clusters, {seconds:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
