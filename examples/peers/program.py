"""Stochastic gradient descent by columns, on peers: none has the whole model, or all data.

The example of the peer-to-peer engine in "OCaml Scientific Computing". The model is a matrix, each
column of which is on some of the peers. In each step a peer takes a random column, and improves it
on data that only it has.
"""

import time
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

import launchpad_lite as lp
from launchpad_lite import engines

FEATURES = 20
COLUMNS = 10
BARRIER = engines.PSP(3)
_SAMPLES = 500
_BATCH = 50


def solution() -> npt.NDArray[np.float64]:
    """Returns the matrix that is to be found."""
    return np.random.default_rng(0).normal(size=(FEATURES, COLUMNS))


class ColumnSgd(engines.PeerToPeer):
    """The code of each peer."""

    def __init__(self, steps: int, barrier: engines.Barrier, slow_s: float) -> None:
        """Says how long and in which order peers go on.

        Args:
            steps: Of each peer.
            barrier: When a peer may begin its next step.
            slow_s: How much longer each step of the first peer takes, in seconds.
        """
        self.barrier = barrier
        self._steps = steps
        self._slow_s = slow_s
        self._done = 0

    def start(self) -> None:
        """Makes the data of this peer."""
        node = lp.current_node()
        self._rng = np.random.default_rng(node.seed)
        self._x = self._rng.normal(size=(_SAMPLES, FEATURES))
        self._y = self._x @ solution() + self._rng.normal(scale=0.1, size=(_SAMPLES, COLUMNS))
        self._pause_s = self._slow_s if node.replica == 0 else 0.0

    def initial(self) -> Mapping[Any, Any]:
        """Returns a matrix of zeros, by columns."""
        return {column: np.zeros(FEATURES) for column in range(COLUMNS)}

    def schedule(self) -> Iterable[Any]:
        """Returns a random column."""
        return [int(self._rng.integers(COLUMNS))]

    def push(self, values: Mapping[Any, Any]) -> Mapping[Any, Any]:
        """Returns a step against the gradient of the squared error, on some of the data."""
        time.sleep(self._pause_s)
        batch = self._rng.choice(_SAMPLES, size=_BATCH, replace=False)
        x = self._x[batch]
        self._done += 1
        return {
            column: -0.1 * x.T @ (x @ weights - self._y[batch, column]) / _BATCH
            for column, weights in values.items()
        }

    def stop(self) -> bool:
        """Returns whether this peer has done its steps."""
        return self._done >= self._steps

    def finish(self) -> None:
        """Keeps its columns until the evaluator has seen them."""
        lp.wait_for_stop()


class Evaluator:
    """Reads the columns while the peers work, and stops the program when they are done."""

    def __init__(self, peers: engines.PeerToPeerClient, steps: int) -> None:
        """Makes one.

        Args:
            peers: Where the columns are.
            steps: Of all peers together.
        """
        self._peers = peers
        self._steps = steps

    def run(self) -> None:
        """Prints the error until all steps are done."""
        start, steps = time.monotonic(), 0
        while steps < self._steps and not lp.wait_for_stop(0.5):
            columns = [self._peers.get(column) for column in range(COLUMNS)]
            steps = sum(column.version for column in columns)
            found = np.stack([column.value for column in columns], axis=1)
            error = float(np.sqrt(np.mean((found - solution()) ** 2)))
            print(
                f"{time.monotonic() - start:5.1f} s: {steps:,} steps of {self._peers.estimate():.0f} "
                f"peers, error {error:.4f}"
            )
        lp.stop()


def make_program(
    peers: int = 20, steps: int = 100, barrier: engines.Barrier = BARRIER, slow_s: float = 0.0
) -> lp.Program:
    """Returns the program.

    Args:
        peers: How many there are.
        steps: Of each of them.
        barrier: When a peer may begin its next step.
        slow_s: How much longer each step of the first peer takes, in seconds.
    """
    program = lp.Program("peers")
    handle = ColumnSgd(steps, barrier, slow_s).add_to(program, peers=peers)
    program.add_node(lp.CourierNode(Evaluator, handle, peers * steps), label="evaluator")
    return program
