"""An inference server: actors step environments, one server decides for all of them in batches.

The architecture of SEED RL (Espeholt et al., 2020): the policy is in one place,
next to the accelerator where there is one; actors hold an environment and
nothing else. Here the policy is a matrix that balances CartPole, so that it
shows at once if an actor gets an action that was meant for another.
"""

import collections
import json
import math
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import launchpad_lite as lp

#: Return from which on CartPole-v1 counts as solved; each step gives 1, and the 500th is the last.
SOLVED = 475.0

#: Preferences for pushing to the left and to the right, shape (4, 2), given the position and
#: velocity of the cart, and the angle and angular velocity of the pole: push to where it falls.
WEIGHTS = np.array([[0.0, 0.0], [0.0, 0.0], [-1.0, 1.0], [-0.5, 0.5]])


@dataclass(frozen=True)
class Result:
    """How a run went.

    Attributes:
        batch_size: So many observations make a batch, at most.
        batches: How often the policy was computed.
        actions: For how many observations.
        largest_batch: Of how many observations at once, at most.
        seconds: From the first actor's begin to the last one's end.
        returns: By actor, of each of its episodes.
    """

    batch_size: int
    batches: int
    actions: int
    largest_batch: int
    seconds: float
    returns: list[list[float]]

    @property
    def mean_batch(self) -> float:
        """Observations in a batch."""
        return self.actions / self.batches

    @property
    def actions_per_s(self) -> float:
        """Steps of all environments together."""
        return self.actions / self.seconds

    @property
    def mean_return(self) -> float:
        """Over all episodes of all actors."""
        return float(np.mean(self.returns))


def policy(observations: npt.NDArray[np.floating[Any]]) -> npt.NDArray[np.int64]:
    """Returns an action, 0 or 1, for each observation, shape (batch, 4)."""
    actions: npt.NDArray[np.int64] = np.argmax(observations @ WEIGHTS, axis=1)
    return actions


class Inference:
    """Decides for all actors."""

    def __init__(self, batch_size: int, timeout_ms: float, cost_ms: float = 0.0) -> None:
        #: Takes an observation, shape (4,), and returns an action; waits for others to come along.
        self.act = lp.batched_handler(batch_size, timeout_s=timeout_ms / 1000)(self._act)
        self._cost_ms = cost_ms
        # One batch runs at a time, so these need no lock.
        self._batches: collections.Counter[int] = collections.Counter()

    def batches(self) -> dict[int, int]:
        """Returns how often a batch of each size was computed."""
        return dict(self._batches)

    def _act(self, observations: npt.NDArray[np.floating[Any]]) -> npt.NDArray[np.int64]:
        self._batches[len(observations)] += 1
        # In place of the cost of a real policy: an accelerator takes as long for one as for all.
        time.sleep(self._cost_ms / 1000)
        return policy(observations)


class Reporter:
    """Gathers the results of the actors."""

    def __init__(
        self, num_actors: int, batch_size: int, inference: Inference, output: Path | None
    ) -> None:
        self._num_actors = num_actors
        self._batch_size = batch_size
        self._inference = inference
        self._output = output
        self._began_at = math.inf
        self._returns: dict[int, list[float]] = {}
        # Calls come in several threads.
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Hears that one more actor begins."""
        with self._lock:
            self._began_at = min(self._began_at, time.monotonic())

    def done(self, actor: int, returns: list[float]) -> None:
        """Hears that an actor has ended, and the returns of its episodes."""
        ended_at = time.monotonic()
        with self._lock:
            self._returns[actor] = returns
            if len(self._returns) < self._num_actors:
                return
        self._finish(self._result(ended_at - self._began_at))

    def _result(self, seconds: float) -> Result:
        batches: Mapping[int, int] = self._inference.batches()
        return Result(
            batch_size=self._batch_size,
            batches=sum(batches.values()),
            actions=sum(size * times for size, times in batches.items()),
            largest_batch=max(batches),
            seconds=seconds,
            returns=[self._returns[actor] for actor in range(self._num_actors)],
        )

    def _finish(self, result: Result) -> None:
        if self._output is not None:
            self._output.write_text(json.dumps(asdict(result)), encoding="utf-8")
        else:
            print(table([result]))


class Actor:
    """Steps an environment; the server decides."""

    # Handles become clients; annotated with the classes they stand for, each call is checked.
    def __init__(self, index: int, episodes: int, inference: Inference, reporter: Reporter) -> None:
        # Loaded by actors only: the server needs no environment.
        import gymnasium as gym

        self._index = index
        self._episodes = episodes
        self._inference = inference
        self._reporter = reporter
        self._environment = gym.make("CartPole-v1")

    def run(self) -> None:
        """Plays its episodes."""
        self._reporter.begin()
        returns = [self._play(seed) for seed in seeds_of(self._index, self._episodes)]
        self._environment.close()
        self._reporter.done(self._index, returns)

    def _play(self, seed: int) -> float:
        """Returns the return of an episode."""
        observation, _ = self._environment.reset(seed=seed)
        total = 0.0
        while True:
            action = self._inference.act(observation)
            observation, reward, terminated, truncated, _ = self._environment.step(action)
            total += float(reward)
            if terminated or truncated:
                return total


def seeds_of(actor: int, episodes: int) -> range:
    """Returns the seeds of an actor's episodes, which no other actor has."""
    return range(actor * episodes, (actor + 1) * episodes)


def table(results: Sequence[Result]) -> str:
    """Returns results as a table, one run a row."""
    rows = [
        f"{result.batch_size:10}  {result.mean_batch:10.2f}  {result.largest_batch:13}"
        f"  {result.batches:7,}  {result.actions:7,}  {result.actions_per_s:9,.0f}"
        f"  {result.mean_return:11.1f}"
        for result in results
    ]
    header = "batch size  mean batch  largest batch  batches  actions  actions/s  mean return"
    return "\n".join([header, *rows])


def make_program(
    num_actors: int = 8,
    batch_size: int | None = None,
    output: Path | None = None,
    *,
    episodes: int = 1,
    timeout_ms: float = 2.0,
    cost_ms: float = 0.0,
) -> lp.Program:
    """Describes the program; nothing runs yet.

    Args:
        num_actors: How many environments are stepped at the same time.
        batch_size: The policy is computed for so many observations at once, at most; None is one
            of each actor.
        output: Where the result is written as JSON; None prints it.
        episodes: Of each actor, up to 500 steps each.
        timeout_ms: How long an observation waits for others, in milliseconds.
        cost_ms: Milliseconds that each batch takes besides, whatever its size.

    Raises:
        ValueError: A number is too small.
        ImportError: Gymnasium is not installed.
    """
    batch_size = num_actors if batch_size is None else batch_size
    counts = {"actor": num_actors, "episode": episodes, "observation in a batch": batch_size}
    for name, count in counts.items():
        if count < 1:
            raise ValueError(f"inference_server needs at least one {name}, not {count}")
    if not timeout_ms >= 0:
        raise ValueError(f"an observation cannot wait for {timeout_ms:g} ms")
    if not cost_ms >= 0:
        raise ValueError(f"a batch cannot take {cost_ms:g} ms")
    # Of what nodes import inside of functions, launchers ask hosts and images for that which this
    # process has loaded: so who lacks it is refused before anything starts.
    import gymnasium  # noqa: F401 - for its being loaded

    program = lp.Program("inference_server")
    inference = program.add_node(
        lp.CourierNode(Inference, batch_size, timeout_ms, cost_ms), label="inference"
    )
    reporter = program.add_node(
        lp.CourierNode(Reporter, num_actors, batch_size, inference, output), label="reporter"
    )
    with program.group("actor"):
        for index in range(num_actors):
            program.add_node(lp.PyClassNode(Actor, index, episodes, inference, reporter))
    return program
