"""Learns to read digits: `python -m examples.image_classification.launch --replicator=multi_worker`."""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import launchpad_lite as lp
from examples.image_classification.program import Settings, train
from launchpad_lite import replicas

REPLICATORS: dict[str, Callable[[int], replicas.Replicator]] = {
    "none": lambda _: replicas.NonReplicator(),
    "multi_gpu": lambda number: replicas.MultiGpuReplicator(num_gpus=number),
    "multi_worker": lambda number: replicas.MultiWorkerReplicator(num_workers=number),
    "async": lambda number: replicas.MultiWorkerAsyncReplicator(num_workers=number),
    "tpu": lambda number: replicas.TpuReplicator(num_tpu_cores_per_worker=number),
}


def main() -> int:
    """Trains, and says how well the network reads; with --scaling, a table for 1 to 8 replicas."""
    parser = argparse.ArgumentParser(description=main.__doc__, allow_abbrev=False)
    parser.add_argument("--replicator", choices=REPLICATORS, default="multi_worker")
    parser.add_argument("--replicas", type=int, default=2, help="default 2")
    parser.add_argument("--launcher", default="local_mp", help="local_mp (default), ssh, ..")
    parser.add_argument("--epochs", type=int, default=10, help="default 10")
    parser.add_argument("--batch", type=int, default=64, help="images in a step, default 64")
    parser.add_argument("--output", help="folder for a picture of the loss")
    parser.add_argument("--scaling", action="store_true", help="print a table of the speed instead")
    options = parser.parse_args()
    if options.scaling:
        print_scaling(options.epochs, options.launcher)
        return 0
    repl = REPLICATORS[options.replicator](options.replicas)
    settings = Settings(options.epochs, options.batch)
    results = repl.launch(train, settings, launcher=options.launcher, label="classifier")
    for number, result in enumerate(results):
        print(
            f"replica {number}: reads {result['accuracy']:.1%} of the test images right, after "
            f"{len(result['losses'])} steps in {result['seconds']:.1f} s"
        )
    if options.output:
        draw(Path(options.output), options.replicator, results)
    return 0


def draw(folder: Path, name: str, results: list[dict[str, Any]]) -> None:
    """Draws the loss of each replica against its steps."""
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    for number, result in enumerate(results):
        axes.plot(result["losses"], label=f"{name}, replica {number}", linewidth=0.8)
    axes.set(xlabel="steps", ylabel="loss", yscale="log")
    axes.legend()
    figure.savefig(folder / f"{name}.svg")


def print_scaling(epochs: int, launcher: str) -> None:
    """Prints the speed of 1 to 8 replicas with 64 images each, and of as many that do not talk.

    The cores of a machine are shared by its replicas. How well replicas communicate is therefore
    seen beside as many trainings of their own, which have the same share of the cores.
    """
    print("replicas  images/s  images/s without communication  efficiency")
    for number in (1, 2, 4, 8):
        settings = Settings(epochs, 64 * number)
        repl = replicas.MultiWorkerReplicator(number)
        results = repl.launch(train, settings, launcher=launcher, label="classifier")
        together = speed(results, 64)
        alone = speed(independent(number, Settings(epochs, 64), launcher), 64)
        print(f"{number:8}  {together:8.0f}  {alone:30.0f}  {together / alone:10.2f}")


def independent(number: int, settings: Settings, launcher: str) -> list[dict[str, Any]]:
    """Runs as many trainings at the same time, each by itself; returns their results."""
    program = lp.Program("independent")
    handles = [
        replicas.NonReplicator().add_to(program, Alone, settings, label=f"alone_{index}")
        for index in range(number)
    ]
    running = lp.launch(program, launcher)
    try:
        return [handle.dereference().result() for handle in handles]
    finally:
        running.stop()


class Alone:
    """A training by itself, whose result can be asked for."""

    def __init__(self, repl: replicas.Replicator, settings: Settings) -> None:
        self._repl = repl
        self._settings = settings
        self._result: dict[str, Any] | None = None

    def run(self) -> None:
        """Trains, and stays."""
        self._result = train(self._repl, self._settings)
        lp.wait_for_stop()

    def result(self) -> dict[str, Any]:
        """Returns the result, once there is one."""
        while self._result is None:
            time.sleep(0.1)
        return self._result


def speed(results: list[dict[str, Any]], batch: int) -> float:
    """Returns how many images per second all replicas together have seen."""
    return float(sum(batch * len(result["losses"]) / result["seconds"] for result in results))


if __name__ == "__main__":
    sys.exit(main())
