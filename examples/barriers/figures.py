"""The figures of the chapter on PSP, computed again: data first, then a picture of it.

Figures 4 to 7 of the chapter on distributed computing in "OCaml Scientific Computing", which
follows Wang, Catterall and Mortier, "Probabilistic Synchronous Parallel" (arXiv 1709.07772).
"""

import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.barriers.training import train
from launchpad_lite import engines

#: Of the sampled progress: as in the chapter.
WORKERS = 200
SECONDS = 200.0

#: What a figure shows, as it is written to a file.
Data = dict[str, Any]


def bounds() -> Data:
    """Returns Figure 4: the bounds on the lag of updates, for sample sizes from 1 to 100."""
    staleness, updates = 4, 10_000
    within = [number / 200 for number in range(10, 200)]
    sizes = [1, 2, 5, 10, 20, 50, 100]

    def lines(bound: Callable[[int, int, float, int], float]) -> Data:
        return {
            str(size): [bound(size, staleness, each, updates) for each in within] for size in sizes
        }

    return {
        "assumptions": f"r = {staleness}, T = {updates}; a = F(r)^beta",
        "F(r)": within,
        "mean": lines(engines.mean_bound),
        "variance": lines(engines.variance_bound),
    }


def progress(workers: int = WORKERS, seconds: float = SECONDS, seed: int = 0) -> Data:
    """Returns Figure 5: how far workers get under each kind of barrier."""
    barriers = {
        "BSP": engines.BSP(),
        "SSP(4)": engines.SSP(4),
        "ASP": engines.ASP(),
        "pBSP(10)": engines.PSP(10),
        "pSSP(10, 4)": engines.PSP(10, staleness=4),
    }
    return _simulated(barriers, workers, seconds, seed)


def sample_sizes(workers: int = WORKERS, seconds: float = SECONDS, seed: int = 0) -> Data:
    """Returns Figure 6: how far workers get under pBSP, for samples of 0 to 64."""
    barriers = {f"beta = {size}": engines.PSP(size) for size in (0, 1, 2, 4, 8, 16, 32, 64)}
    return _simulated(barriers, workers, seconds, seed)


def _simulated(
    barriers: Mapping[str, engines.Barrier], workers: int, seconds: float, seed: int
) -> Data:
    results = {
        name: engines.simulate(barrier, workers=workers, seconds=seconds, seed=seed)
        for name, barrier in barriers.items()
    }
    return {
        "assumptions": (
            f"{workers} workers, {seconds:g} virtual seconds; each step takes a time that is "
            "exponential with a mean of 1 s, for all workers alike; messages take no time; a worker "
            f"that waits keeps its sample; seed {seed}"
        ),
        "steps": {name: sorted(result.steps) for name, result in results.items()},
        "waited": {name: round(result.waited, 4) for name, result in results.items()},
    }


def draw_bounds(data: Data) -> Any:
    """Returns the picture of Figure 4."""
    figure, axes = _picture(columns=2)
    colours = _colours(len(data["mean"]))
    for axis, name in zip(axes, ("mean", "variance"), strict=True):
        for colour, (size, values) in zip(colours, data[name].items(), strict=True):
            axis.plot(data["F(r)"], values, color=colour, label=f"β = {size}")
        axis.set(
            yscale="log", xlabel="F(r): a worker lags at most r steps", title=f"bound on the {name}"
        )
        axis.grid(alpha=0.3)
    axes[1].legend(fontsize="small")
    return figure


def draw_progress(data: Data) -> Any:
    """Returns the picture of Figures 5 and 6."""
    figure, (axis,) = _picture(columns=1)
    steps: dict[str, list[int]] = data["steps"]
    for colour, (name, values) in zip(_colours(len(steps)), steps.items(), strict=True):
        shares = [number / len(values) for number in range(1, len(values) + 1)]
        axis.step(values, shares, where="post", color=colour, label=name)
    axis.set(xlabel="steps finished", ylabel="part of the workers", xlim=(0, None))
    axis.grid(alpha=0.3)
    axis.legend(fontsize="small")
    return figure


def table_of_progress(data: Data) -> str:
    """Returns Figures 5 and 6 as a table."""
    lines = [f"{'barrier':<14}{'slowest':>9}{'median':>8}{'fastest':>9}{'spread':>8}{'waited':>8}"]
    for name, steps in data["steps"].items():
        spread = statistics.pstdev(steps)
        lines.append(
            f"{name:<14}{steps[0]:>9}{statistics.median(steps):>8g}{steps[-1]:>9}"
            f"{spread:>8.1f}{data['waited'][name]:>8.0%}"
        )
    return "\n".join(lines)


def draw_training(data: Data) -> Any:
    """Returns the picture of Figure 7."""
    figure, axes = _picture(columns=2)
    barriers: dict[str, dict[str, list[float]]] = data["barriers"]
    for axis, unit in zip(axes, ("updates", "seconds"), strict=True):
        for colour, (name, seen) in zip(_colours(len(barriers)), barriers.items(), strict=True):
            axis.plot(seen[unit], seen["accuracy"], color=colour, label=name)
        axis.set(xlabel=unit, ylabel="accuracy on the test digits", ylim=(0, 1))
        axis.grid(alpha=0.3)
    axes[1].legend(fontsize="small")
    return figure


def table_of_training(data: Data) -> str:
    """Returns Figure 7 as a table: when nine tenths of the digits were recognised."""
    lines = [f"{'barrier':<12}{'updates':>9}{'accuracy':>10}{'90 % after':>26}"]
    for name, seen in data["barriers"].items():
        good = [place for place, accuracy in enumerate(seen["accuracy"]) if accuracy >= 0.9]
        after = "never"
        if good:
            after = f"{seen['updates'][good[0]]} updates, {seen['seconds'][good[0]]:.0f} s"
        lines.append(f"{name:<12}{seen['updates'][-1]:>9}{seen['accuracy'][-1]:>10.2f}{after:>26}")
    return "\n".join(lines)


def table_of_bounds(data: Data) -> str:
    """Returns Figure 4 as a table: the bounds where F(r) is about 0.9."""
    place = min(range(len(data["F(r)"])), key=lambda index: abs(data["F(r)"][index] - 0.9))
    lines = [f"F(r) = {data['F(r)'][place]:g}", f"{'beta':>6}{'mean':>12}{'variance':>14}"]
    for size in data["mean"]:
        mean, variance = data["mean"][size][place], data["variance"][size][place]
        lines.append(f"{size:>6}{mean:>12.2f}{variance:>14.2f}")
    return "\n".join(lines)


def _picture(columns: int) -> tuple[Any, Sequence[Any]]:
    # Loaded when a picture is drawn only. Without a screen, and the same bytes each time.
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams["svg.hashsalt"] = "launchpad-lite"
    figure = Figure(figsize=(4.2 * columns + 1.5, 3.6), layout="constrained")
    return figure, list(itertools.chain.from_iterable(figure.subplots(1, columns, squeeze=False)))


def _colours(number: int) -> list[Any]:
    import matplotlib as mpl

    shades = mpl.colormaps["viridis"]
    return [shades(index / max(1, number)) for index in range(number)]


@dataclass(frozen=True)
class Figure:
    """How a figure is made."""

    title: str
    compute: Callable[..., Data]
    draw: Callable[[Data], Any]
    table: Callable[[Data], str]


FIGURES = {
    4: Figure("bounds on the lag of updates", bounds, draw_bounds, table_of_bounds),
    5: Figure("progress under each barrier", progress, draw_progress, table_of_progress),
    6: Figure("progress with pBSP by sample size", sample_sizes, draw_progress, table_of_progress),
    7: Figure("accuracy of a network under each barrier", train, draw_training, table_of_training),
}


def save(figure: Any, path: Path) -> None:
    """Writes a picture."""
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
