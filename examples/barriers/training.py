"""Figure 7: six real workers train a small neural network under each barrier.

Each barrier has a parameter server of its own; all of them are one program, and run at the same
time. A worker waits before each of its updates, as long as gamma(1, 1) says, in place of a slow
network. The digits are those that come with scikit-learn: 1,797 images of 8 by 8 pixels.
"""

import json
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import launchpad_lite as lp
from launchpad_lite import engines

Array = npt.NDArray[np.float64]

BARRIERS: dict[str, engines.Barrier] = {
    "BSP": engines.BSP(),
    "SSP(4)": engines.SSP(4),
    "ASP": engines.ASP(),
    "pBSP(2)": engines.PSP(2),
    "pSSP(2, 4)": engines.PSP(2, staleness=4),
}
WORKERS = 6
_HIDDEN = 32
_BATCH = 32
_RATE = 0.1
#: Updates between two evaluations.
_EVALUATE_EVERY = 6


def digits() -> tuple[Array, Array, Array, Array]:
    """Returns images of 64 pixels and digits: for training, and for tests."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    images, labels = images[order] / 16.0, labels[order]
    return images[:1500], labels[:1500], images[1500:], labels[1500:]


def first_weights() -> dict[str, Array]:
    """Returns the weights of a network with one hidden layer."""
    rng = np.random.default_rng(1)
    return {
        "in": rng.normal(scale=1 / 8, size=(64, _HIDDEN)),
        "hidden": np.zeros(_HIDDEN),
        "out": rng.normal(scale=_HIDDEN**-0.5, size=(_HIDDEN, 10)),
        "bias": np.zeros(10),
    }


def forward(weights: Mapping[Any, Array], images: Array) -> tuple[Array, Array]:
    """Returns the hidden layer and the probability of each digit, shape (images, 10)."""
    hidden = np.maximum(0, images @ weights["in"] + weights["hidden"])
    scores = hidden @ weights["out"] + weights["bias"]
    scores = np.exp(scores - scores.max(axis=1, keepdims=True))
    return hidden, scores / scores.sum(axis=1, keepdims=True)


def gradients(weights: Mapping[Any, Array], images: Array, labels: Array) -> dict[str, Array]:
    """Returns the gradients of the mean cross-entropy, by backpropagation."""
    hidden, errors = forward(weights, images)
    errors[np.arange(len(labels)), labels.astype(int)] -= 1
    errors /= len(labels)
    back = (errors @ weights["out"].T) * (hidden > 0)
    return {
        "in": images.T @ back,
        "hidden": back.sum(axis=0),
        "out": hidden.T @ errors,
        "bias": errors.sum(axis=0),
    }


class Training(engines.ParameterServer):
    """Trains the network, and notes its accuracy."""

    def __init__(
        self,
        barrier: engines.Barrier,
        data: tuple[Array, Array, Array, Array],
        seconds: float,
        mean_delay_s: float,
        path: Path,
    ) -> None:
        self.barrier = barrier
        # Loaded once, by the script: scikit-learn takes seconds to import.
        self._data = data
        self._seconds = seconds
        self._mean_delay_s = mean_delay_s
        self._path = path

    def start(self) -> None:
        """Makes random numbers of its own."""
        self._random = np.random.default_rng(lp.current_node().seed)
        self._began: float | None = None
        #: Seconds, updates and accuracy.
        self._seen: list[tuple[float, int, float]] = []

    def initial(self) -> Mapping[Any, Any]:
        """Returns the first weights."""
        return first_weights()

    def push(self, worker: str, values: Mapping[Any, Any]) -> Mapping[Any, Any]:  # noqa: ARG002
        """Returns a step against the gradients on a few images."""
        time.sleep(self._random.gamma(1.0, self._mean_delay_s))
        images, labels, *_ = self._data
        batch = self._random.integers(len(labels), size=_BATCH)
        found = gradients(values, images[batch], labels[batch])
        return {name: -_RATE * gradient for name, gradient in found.items()}

    def stop(self) -> bool:
        """Evaluates the weights; returns whether the time is over."""
        # The clock runs once all workers are there.
        if self._began is None and self.worker_num() == WORKERS:
            self._began = time.monotonic()
        seconds = 0.0 if self._began is None else time.monotonic() - self._began
        updates = self.get("in").version
        if not self._seen or updates >= self._seen[-1][1] + _EVALUATE_EVERY:
            _, _, images, labels = self._data
            weights = {name: self.get(name).value for name in ("in", "hidden", "out", "bias")}
            _, probabilities = forward(weights, images)
            accuracy = float((probabilities.argmax(axis=1) == labels).mean())
            self._seen.append((seconds, updates, accuracy))
        is_over = seconds > self._seconds
        if is_over:
            self._path.write_text(json.dumps(self._seen), encoding="utf-8")
        return is_over


def make_program(folder: Path, seconds: float = 40.0, mean_delay_s: float = 1.0) -> lp.Program:
    """Describes a program that trains with each barrier at the same time.

    Args:
        folder: Where the servers write what they have seen.
        seconds: How long each of them trains.
        mean_delay_s: How long a worker waits before an update, on average.
    """
    program, data = lp.Program("barriers"), digits()
    for number, barrier in enumerate(BARRIERS.values()):
        path = folder / f"{number}.json"
        Training(barrier, data, seconds, mean_delay_s, path).add_to(
            program, workers=WORKERS, label=f"ps{number}", progress_s=None
        )
    return program


def train(
    seconds: float = 60.0, mean_delay_s: float = 1.0, launcher: str = "local_mp"
) -> dict[str, Any]:
    """Returns Figure 7: the accuracy after so many updates, and seconds, by barrier.

    Args:
        seconds: How long each of them trains.
        mean_delay_s: How long a worker waits before an update, on average.
        launcher: Where the program runs.
    """
    with tempfile.TemporaryDirectory() as folder:
        lp.launch(make_program(Path(folder), seconds, mean_delay_s), launcher).wait()
        seen = {
            name: json.loads((Path(folder) / f"{number}.json").read_text(encoding="utf-8"))
            for number, name in enumerate(BARRIERS)
        }
    return {
        "assumptions": (
            f"{WORKERS} workers for each barrier, {seconds:g} s; each waits gamma(1, {mean_delay_s:g}) "
            f"seconds before an update; batches of {_BATCH} digits, rate {_RATE}; network 64-{_HIDDEN}-10"
        ),
        "barriers": {
            name: {
                "seconds": [round(time_s, 2) for time_s, _, _ in values],
                "updates": [updates for _, updates, _ in values],
                "accuracy": [round(accuracy, 4) for _, _, accuracy in values],
            }
            for name, values in seen.items()
        },
    }
