"""Searches for a network that reads digits: `python -m examples.architecture_search.launch`."""

import argparse
import sys
from pathlib import Path

from examples.architecture_search.program import make_search
from launchpad_lite import search


def main() -> int:
    """Searches, and prints the best modules; with --compare, with several numbers of workers."""
    parser = argparse.ArgumentParser(description=main.__doc__, allow_abbrev=False)
    parser.add_argument("--launcher", default="local_mp", help="local_mp (default), ssh, ..")
    parser.add_argument("--workers", type=int, default=2, help="default 2")
    parser.add_argument("--brokers", type=int, default=1, help="default 1")
    parser.add_argument("--trials", type=int, default=60, help="networks to train, default 60")
    parser.add_argument("--epochs", type=int, default=6, help="of each network, default 6")
    parser.add_argument("--seed", type=int, default=0, help="default 0")
    parser.add_argument("--die", type=float, default=0.0, help="chance to be killed per epoch")
    parser.add_argument("--folder", help="where the search is kept, to go on after an end")
    parser.add_argument("--compare", help="folder for a table and a picture of several searches")
    options = parser.parse_args()
    if options.compare:
        compare(Path(options.compare), options)
        return 0
    result = find(options, options.workers, options.die, options.folder)
    ranked = sorted(result.trials, key=lambda trial: trial.score or 0.0, reverse=True)
    print("validation accuracy  module")
    for trial in ranked[:5]:
        print(f"{trial.score or 0.0:19.3f}  {trial.params['candidate']}")
    print(f"{len(result.trials)} networks in {result.seconds:.0f} s")
    return 0


def find(
    options: argparse.Namespace, workers: int, die_p: float, folder: str | None = None
) -> search.Result:
    """Runs one search."""
    model = make_search(options.trials, options.epochs, options.seed, die_p)
    return search.run(
        model,
        workers=workers,
        brokers=options.brokers,
        launcher=options.launcher,
        folder=folder,
        max_losses=100,
    )


def compare(folder: Path, options: argparse.Namespace) -> None:
    """Runs the same search with 1, 2 and 4 workers, and with workers that are killed."""
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    print("workers  killed  networks  seconds  networks/min   best")
    for workers, die_p in ((1, 0.0), (2, 0.0), (4, 0.0), (4, 0.05)):
        result = find(options, workers, die_p)
        result.to_csv(folder / f"{workers}-workers{'-killed' if die_p else ''}.csv")
        per_minute = 60 * len(result.trials) / result.seconds
        best = result.best.score if result.best and result.best.score else 0.0
        print(
            f"{workers:7}  {'yes' if die_p else 'no':>6}  {len(result.trials):8}"
            f"  {result.seconds:7.0f}  {per_minute:12.1f}  {best:.3f}"
        )
        times, scores = result.best_over_time()
        name = f"{workers} workers{', killed at random' if die_p else ''}"
        axes.step(times, scores, where="post", label=name)
    axes.set_xlabel("seconds")
    axes.set_ylabel("best validation accuracy so far")
    axes.legend()
    figure.savefig(folder / "comparison.svg")


if __name__ == "__main__":
    sys.exit(main())
