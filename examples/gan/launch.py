"""Learns to draw digits: `python -m examples.gan.launch --replicas=2 --output=runs/gan`."""

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np

from examples.gan.program import Settings, drawn_labels, train
from examples.gan.scoring import Score, score
from launchpad_lite import replicas


def main() -> int:
    """Trains an SN-GAN, and scores its images; with --compare, with 1, 2, 4 and 8 replicas."""
    parser = argparse.ArgumentParser(description=main.__doc__, allow_abbrev=False)
    parser.add_argument("--launcher", default="local_mp", help="local_mp (default), ssh, ..")
    parser.add_argument("--replicas", type=int, default=2, help="default 2")
    parser.add_argument("--batch", type=int, default=64, help="of each replica (default 64)")
    parser.add_argument("--steps", type=int, default=Settings.steps, help="default %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default 0")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="for pictures")
    parser.add_argument("--compare", action="store_true", help="a table of several batches")
    options = parser.parse_args()
    settings = Settings(options.steps, options.batch, seed=options.seed)
    if options.output is not None:
        options.output.mkdir(parents=True, exist_ok=True)
    print("replicas  batch   step  inception  Frechet  right  seconds", flush=True)
    curves = {}
    for number in (1, 2, 4, 8) if options.compare else (options.replicas,):
        repl = replicas.MultiWorkerReplicator(number)
        result = repl.launch(train, settings, launcher=options.launcher, label="gan")[0]
        curve = [(step, score(images, drawn_labels())) for step, images in result["drawn"].items()]
        print_scores(number, settings, curve[-1:] if options.compare else curve, result["seconds"])
        curves[number * settings.batch] = curve
        if options.output is not None:
            draw_grid(result["drawn"][settings.steps], options.output / f"digits-{number}.png")
    if options.output is not None:
        draw_scores(curves, options.output / "scores.svg")
    return 0


def print_scores(
    number: int, settings: Settings, curve: list[tuple[int, Score]], seconds: float
) -> None:
    """Prints lines of the table; the last one has the time of the whole training."""
    for step, found in curve:
        time = f"{seconds:7.1f}" if step == settings.steps else ""
        print(
            f"{number:8}  {number * settings.batch:5}  {step:5}  {found.inception:9.2f}  "
            f"{found.frechet:7.2f}  {found.right:5.1%}  {time}",
            flush=True,
        )


def draw_grid(images: Any, path: Path) -> None:
    """Draws ten images of each digit, a column for each."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 5), layout="constrained")
    # Image 10 i + k is the i-th of digit k. White pixels keep them apart.
    apart = np.pad(images[:100, 0], ((0, 0), (1, 1), (1, 1)), constant_values=-1)
    grid = apart.reshape(10, 10, 10, 10).transpose(0, 2, 1, 3).reshape(100, 100)
    axes = figure.add_subplot()
    axes.imshow(grid, cmap="gray_r", vmin=-1, vmax=1)
    axes.axis("off")
    figure.savefig(path)


def draw_scores(curves: dict[int, list[tuple[int, Score]]], path: Path) -> None:
    """Draws both scores against the steps, a line for each batch."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    inception, frechet = figure.subplots(1, 2)
    for batch, curve in curves.items():
        steps, scores = zip(*curve, strict=True)
        inception.plot(steps, [each.inception for each in scores], ".-", label=f"batch {batch}")
        frechet.plot(steps, [each.frechet for each in scores], ".-", label=f"batch {batch}")
    inception.set(xlabel="steps", ylabel="inception score (higher is better)")
    frechet.set(xlabel="steps", ylabel="Fréchet distance (lower is better)", yscale="log")
    inception.legend()
    figure.savefig(path)


if __name__ == "__main__":
    sys.exit(main())
