"""A parameter server in three topologies: Listings 3 and 4 of the Launchpad paper.

Requesters train a linear regression by asynchronous SGD: each pulls the
weights, computes the gradient on a few samples, and pushes it to a server,
which does not wait (Dean et al., "Large Scale Distributed Deep Networks", 2012). The paper's
servers sleep instead; here the best weights are known, so that each topology shows what it gains
and what it costs.
"""

import json
import math
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

import launchpad_lite as lp

Array = npt.NDArray[np.float64]

TOPOLOGIES = ("single", "replicated", "cached")


@dataclass(frozen=True)
class Regression:
    """The problem: the weights of `targets = features @ weights + noise`.

    All nodes make the same samples from the seed, so none are sent.

    Attributes:
        dimension: How many weights there are.
        samples: How many samples to learn from; at least `dimension`, or many weights are best.
        noise: Standard deviation of the noise.
        seed: Decides features, weights and noise.
    """

    dimension: int = 64
    samples: int = 4096
    noise: float = 0.1
    seed: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.dimension <= self.samples:
            raise ValueError(
                f"a regression needs at least 1 weight and as many samples as weights, not "
                f"dimension={self.dimension} and samples={self.samples}"
            )

    def data(self) -> tuple[Array, Array]:
        """Returns features, shape (samples, dimension), and targets, shape (samples,)."""
        rng = np.random.default_rng(self.seed)
        weights = rng.normal(size=self.dimension)
        features = rng.normal(size=(self.samples, self.dimension))
        return features, features @ weights + rng.normal(scale=self.noise, size=self.samples)


@dataclass(frozen=True)
class Served:
    """The result and the load of a server.

    Attributes:
        weights: Shape (dimension,).
        pulls: How often it was asked for them.
        pushes: How many gradients it took in.
    """

    weights: Array
    pulls: int
    pushes: int


@dataclass(frozen=True)
class Result:
    """How a training went.

    Attributes:
        topology: One of `TOPOLOGIES`.
        pulls: How often requesters got weights, from whomever.
        server_pulls: How often servers were asked for them.
        pushes: How many gradients servers took in.
        seconds: From the first requester's begin to the last one's end.
        loss: Mean squared error over all samples.
        least_loss: That of the best weights, by least squares.
        distance: From the weights to the best, as a part of the length of those.
        weights: What was learned, shape (dimension,).
    """

    topology: str
    pulls: int
    server_pulls: int
    pushes: int
    seconds: float
    loss: float
    least_loss: float
    distance: float
    weights: list[float]

    @property
    def pulls_per_s(self) -> float:
        """Pulls of all requesters together."""
        return self.pulls / self.seconds


class ParamServer:
    """Holds the weights. Thread-safe."""

    def __init__(self, dimension: int, learning_rate: float) -> None:
        self._learning_rate = learning_rate
        # Replaced, never changed: an answer may still be on its way.
        self._weights = np.zeros(dimension)
        self._pulls = 0
        self._pushes = 0
        # Calls come in several threads.
        self._lock = threading.Lock()

    def pull(self) -> Array:
        """Returns the weights, shape (dimension,)."""
        with self._lock:
            self._pulls += 1
            return self._weights

    def push(self, gradient: Array) -> None:
        """Takes a step against a gradient, shape (dimension,), of these or of older weights."""
        with self._lock:
            self._pushes += 1
            self._weights = self._weights - self._learning_rate * gradient

    def served(self) -> Served:
        """Returns what was learned so far; does not count as a pull."""
        with self._lock:
            return Served(self._weights, self._pulls, self._pushes)


class Evaluator:
    """Compares what the servers hold with the best weights, when all requesters are done."""

    def __init__(
        self,
        topology: str,
        regression: Regression,
        num_requesters: int,
        servers: Sequence[ParamServer],
        output: Path | None,
    ) -> None:
        self._topology = topology
        self._regression = regression
        self._running_requesters = num_requesters
        self._servers = servers
        self._output = output
        self._pulls = 0
        self._began_at = math.inf
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Hears that one more requester begins."""
        with self._lock:
            self._began_at = min(self._began_at, time.monotonic())

    def done(self, pulls: int) -> None:
        """Hears that one more requester has ended, after so many pulls."""
        ended_at = time.monotonic()
        with self._lock:
            self._pulls += pulls
            self._running_requesters -= 1
            if self._running_requesters:
                return
        self._finish(self._evaluate(ended_at - self._began_at))

    def _evaluate(self, seconds: float) -> Result:
        served = [server.served() for server in self._servers]
        # Replicas know nothing of each other, so the mean is a better model than any of them
        # (Zinkevich et al., "Parallelized Stochastic Gradient Descent", 2010).
        weights = np.mean([each.weights for each in served], axis=0)
        features, targets = self._regression.data()
        best = np.linalg.lstsq(features, targets, rcond=None)[0]
        return Result(
            topology=self._topology,
            pulls=self._pulls,
            server_pulls=sum(each.pulls for each in served),
            pushes=sum(each.pushes for each in served),
            seconds=seconds,
            loss=float(np.mean((features @ weights - targets) ** 2)),
            least_loss=float(np.mean((features @ best - targets) ** 2)),
            distance=float(np.linalg.norm(weights - best) / np.linalg.norm(best)),
            weights=weights.tolist(),
        )

    def _finish(self, result: Result) -> None:
        if self._output is not None:
            self._output.write_text(json.dumps(asdict(result)), encoding="utf-8")
        else:
            print(table([result]))


class Requester:
    """Trains: pulls weights, pushes gradients."""

    # Handles become clients; annotated with the classes they stand for, each call is checked.
    def __init__(
        self,
        regression: Regression,
        index: int,
        steps: int,
        batch_size: int,
        source: ParamServer,
        server: ParamServer,
        evaluator: Evaluator,
    ) -> None:
        self._features, self._targets = regression.data()
        self._steps = steps
        self._batch_size = batch_size
        # Not of the index alone: that could be the generator that made the samples.
        self._rng = np.random.default_rng([regression.seed, index])
        self._source = source
        self._server = server
        self._evaluator = evaluator

    def run(self) -> None:
        """Takes its steps."""
        self._evaluator.begin()
        for _ in range(self._steps):
            self._server.push(self._gradient(self._source.pull()))
        self._evaluator.done(self._steps)

    def _gradient(self, weights: Array) -> Array:
        """Returns that of half the mean squared error, on samples drawn at random."""
        chosen = self._rng.integers(len(self._targets), size=self._batch_size)
        features = self._features[chosen]
        errors = features @ weights - self._targets[chosen]
        return np.asarray(features.T @ errors / self._batch_size)


def table(results: Sequence[Result]) -> str:
    """Returns results as a table, one topology a row."""
    rows = [
        f"{result.topology:<10}  {result.pulls_per_s:7,.0f}  {result.pulls:6,}"
        f"  {result.server_pulls:16,}  {result.pushes:6,}"
        f"  {result.loss:.6f}  {result.least_loss:.6f}  {result.distance:8.2%}"
        for result in results
    ]
    header = "topology    pulls/s   pulls  reached a server  pushes  loss      least     distance"
    return "\n".join([header, *rows])


def make_program(
    topology: str = "single",
    num_requesters: int = 8,
    output: Path | None = None,
    *,
    num_servers: int = 2,
    num_cachers: int = 2,
    steps: int = 400,
    batch_size: int = 64,
    learning_rate: float = 0.005,
    refresh_s: float = 0.005,
    stale_s: float = 0.02,
    regression: Regression = Regression(),
) -> lp.Program:
    """Describes the program; nothing runs yet.

    Args:
        topology: "single": one server for all requesters. "replicated": several servers, each
            trained by its share of the requesters; the mean of their weights counts. "cached": one
            server, from which cachers pull for the requesters.
        num_requesters: How many train at the same time.
        output: Where the result is written as JSON; None prints it.
        num_servers: How many, in the replicated topology.
        num_cachers: How many, in the cached topology.
        steps: Of each requester: one pull and one push each.
        batch_size: How many samples make a gradient.
        learning_rate: How far a gradient moves the weights. The more gradients arrive while weights
            grow old, the smaller it must be: its product with their number is to stay below 1.
        refresh_s: Seconds: a cacher pulls at most so often.
        stale_s: Seconds: no cacher gives out weights that are older.
        regression: What is learned.

    Raises:
        ValueError: There is no such topology, or a number is too small.
    """
    counts = {
        "requester": num_requesters,
        "server": num_servers,
        "cacher": num_cachers,
        "step": steps,
        "sample in a batch": batch_size,
    }
    for name, count in counts.items():
        if count < 1:
            raise ValueError(f"parameter_server needs at least one {name}, not {count}")

    program = lp.Program("parameter_server")

    def add_server() -> lp.Handle[ParamServer]:
        return program.add_node(lp.CourierNode(ParamServer, regression.dimension, learning_rate))

    def add_cacher(server: lp.Handle[ParamServer]) -> lp.Handle[ParamServer]:
        return program.add_node(lp.CacherNode(server, refresh_s=refresh_s, stale_s=stale_s))

    # Weights come from `sources`, gradients go to `servers`.
    if topology == "single":
        with program.group("server"):
            sources = servers = [add_server()]
    elif topology == "replicated":
        if num_requesters < num_servers:
            raise ValueError(
                f"each of {num_servers} servers needs a requester that trains it, and there are "
                f"only {num_requesters}"
            )
        with program.group("server"):
            sources = servers = [add_server() for _ in range(num_servers)]
    elif topology == "cached":
        with program.group("server"):
            servers = [add_server()]
        with program.group("cacher"):
            sources = [add_cacher(servers[0]) for _ in range(num_cachers)]
    else:
        raise ValueError(f"no topology {topology!r}; there are: {', '.join(TOPOLOGIES)}")

    evaluator = program.add_node(
        lp.CourierNode(Evaluator, topology, regression, num_requesters, servers, output),
        label="evaluator",
    )
    with program.group("requester"):
        for index in range(num_requesters):
            source, server = sources[index % len(sources)], servers[index % len(servers)]
            program.add_node(
                lp.PyClassNode(
                    Requester, regression, index, steps, batch_size, source, server, evaluator
                )
            )
    return program
