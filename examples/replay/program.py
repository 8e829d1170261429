"""Off-policy learning with a replay buffer: a deep Q-network (DQN) learns to balance a pole.

Actors play CartPole and insert transitions into Reverb; a learner samples them. Reverb's rate
limiter holds the ratio of samples to inserts: the side that is ahead waits. An evaluator
stops the program when the learner plays well enough.
"""

import functools
import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import launchpad_lite as lp

if TYPE_CHECKING:
    import reverb

TABLE = "transitions"
OBSERVATION_SIZE, NUM_ACTIONS, HIDDEN_SIZE = 4, 2, 64
BATCH_SIZE = 64
DISCOUNT = 0.99
LEARNING_RATE = 1e-3
#: Learner steps between two copies of the network to the target network.
TARGET_PERIOD = 200
#: Transitions in the buffer before the first is sampled.
MIN_SIZE = 500
#: How many samples the ratio may be ahead or behind.
ERROR_BUFFER = 20.0 * BATCH_SIZE
#: Seconds in which nodes that wait for the rate limiter notice a stop.
TIMEOUT_MS = 500
#: Steps of an actor with the same weights.
ACTOR_PERIOD = 50

#: Weights and biases by name, float32.
Params = dict[str, np.ndarray]


@dataclass(frozen=True)
class Result:
    """How it ended.

    Attributes:
        mean_return: Of the last evaluation; 500 is perfect.
        learner_steps: Batches that were learned from.
        inserts: Transitions that were inserted.
        samples: Transitions that were sampled.
        ratio: Samples per insert, after the first `MIN_SIZE` inserts.
        asked_ratio: The requested ratio of the rate limiter.
    """

    mean_return: float
    learner_steps: int
    inserts: int
    samples: int
    ratio: float
    asked_ratio: float


def make_tables(samples_per_insert: float) -> "list[reverb.Table]":
    """Returns the tables of the replay buffer; called in its node."""
    import reverb
    import tensorflow as tf

    signature = {
        "observation": tf.TensorSpec((OBSERVATION_SIZE,), tf.float32),
        "action": tf.TensorSpec((), tf.int32),
        "reward": tf.TensorSpec((), tf.float32),
        "discount": tf.TensorSpec((), tf.float32),
        "next_observation": tf.TensorSpec((OBSERVATION_SIZE,), tf.float32),
    }
    return [
        reverb.Table(
            name=TABLE,
            sampler=reverb.selectors.Uniform(),
            remover=reverb.selectors.Fifo(),
            max_size=50_000,
            rate_limiter=reverb.rate_limiters.SampleToInsertRatio(
                samples_per_insert, MIN_SIZE, ERROR_BUFFER
            ),
            signature={
                name: tf.TensorSpec((1, *s.shape), s.dtype) for name, s in signature.items()
            },
        )
    ]


class QNetwork:
    """A network of two hidden layers, trained by Adam (https://arxiv.org/abs/1412.6980)."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        sizes = [OBSERVATION_SIZE, HIDDEN_SIZE, HIDDEN_SIZE, NUM_ACTIONS]
        self.params: Params = {}
        for layer, (fan_in, fan_out) in enumerate(itertools.pairwise(sizes)):
            weights = rng.normal(0.0, np.sqrt(2.0 / fan_in), (fan_in, fan_out))
            self.params[f"w{layer}"] = weights.astype(np.float32)
            self.params[f"b{layer}"] = np.zeros(fan_out, np.float32)
        self._mean = {name: np.zeros_like(value) for name, value in self.params.items()}
        self._variance = {name: np.zeros_like(value) for name, value in self.params.items()}
        self._steps = 0

    def step(self, observations: np.ndarray, actions: np.ndarray, targets: np.ndarray) -> None:
        """Moves the values of the actions towards targets, by the Huber loss.

        Args:
            observations: Shape (batch, observation).
            actions: Shape (batch,).
            targets: Shape (batch,).
        """
        *hidden, values = forward(self.params, observations)
        rows = np.arange(len(actions))
        delta = np.zeros_like(values)
        delta[rows, actions] = np.clip(values[rows, actions] - targets, -1, 1) / len(actions)
        gradients = {}
        for layer in (2, 1, 0):
            gradients[f"w{layer}"] = hidden[layer].T @ delta
            gradients[f"b{layer}"] = delta.sum(axis=0)
            delta = (delta @ self.params[f"w{layer}"].T) * (hidden[layer] > 0)
        self._steps += 1
        rate = LEARNING_RATE * np.sqrt(1 - 0.999**self._steps) / (1 - 0.9**self._steps)
        for name, gradient in gradients.items():
            self._mean[name] += 0.1 * (gradient - self._mean[name])
            self._variance[name] += 0.001 * (gradient**2 - self._variance[name])
            update = rate * self._mean[name] / (np.sqrt(self._variance[name]) + 1e-8)
            # A new array: others may hold the old one.
            self.params[name] = (self.params[name] - update).astype(np.float32)


def forward(params: Params, observations: np.ndarray) -> list[np.ndarray]:
    """Returns the input of each layer, and last the values, shape (batch, actions)."""
    activations = [observations]
    for layer in range(3):
        x = activations[-1] @ params[f"w{layer}"] + params[f"b{layer}"]
        activations.append(np.maximum(x, 0) if layer < 2 else x)
    return activations


def greedy(params: Params, observation: np.ndarray) -> int:
    """Returns the action of highest value."""
    return int(forward(params, observation[None])[-1].argmax())


class Learner:
    """Learns from the replay buffer: DQN (https://www.nature.com/articles/nature14236).

    With a target network, and double Q-learning (https://arxiv.org/abs/1509.06461).
    """

    def __init__(self, replay: "reverb.Client", asked_ratio: float, seed: int) -> None:
        self._replay = replay
        self._asked_ratio = asked_ratio
        self._network = QNetwork(seed)
        self._steps = 0

    def params(self) -> Params:
        """Returns the weights."""
        return dict(self._network.params)

    def result(self, mean_return: float) -> Result:
        """Returns the progress so far."""
        limiter = self._replay.server_info()[TABLE].rate_limiter_info
        inserts, samples = limiter.insert_stats.completed, limiter.sample_stats.completed
        ratio = samples / max(1, inserts - MIN_SIZE)
        return Result(mean_return, self._steps, inserts, samples, ratio, self._asked_ratio)

    def run(self) -> None:
        """Learns until the program stops."""
        target = self.params()
        for batch in self._batches():
            if self._steps % TARGET_PERIOD == 0:
                target = self.params()
            after = batch["next_observation"]
            best = forward(self._network.params, after)[-1].argmax(axis=1)
            values = forward(target, after)[-1][np.arange(len(best)), best]
            targets = batch["reward"] + batch["discount"] * values
            self._network.step(batch["observation"], batch["action"], targets)
            self._steps += 1

    def _batches(self) -> Iterator[Mapping[str, np.ndarray]]:
        """Yields batches of transitions, each array of shape (batch, ...), until the stop."""
        import reverb

        dataset = reverb.TrajectoryDataset.from_table_signature(
            self._replay.server_address,
            TABLE,
            max_in_flight_samples_per_worker=2 * BATCH_SIZE,
            num_workers_per_iterator=1,
            rate_limiter_timeout_ms=TIMEOUT_MS,
        ).batch(BATCH_SIZE, drop_remainder=True)
        stop = lp.stop_event()
        while not stop.is_set():
            # Ends when there is nothing to sample for so long: time to look at the stop.
            for sample in dataset.as_numpy_iterator():
                yield {name: column[:, 0] for name, column in sample.data.items()}
                if stop.is_set():
                    return


class Actor:
    """Plays, at random at first, and inserts its experience."""

    def __init__(self, replay: "reverb.Client", learner: Learner, seed: int) -> None:
        self._replay = replay
        self._learner = learner
        self._seed = seed

    def run(self) -> None:
        """Plays until the program stops."""
        import gymnasium
        import reverb

        stop, rng = lp.stop_event(), np.random.default_rng(self._seed)
        env = gymnasium.make("CartPole-v1")
        observation, _ = env.reset(seed=self._seed)
        writer = self._replay.trajectory_writer(num_keep_alive_refs=1)
        params, steps = self._learner.params(), 0
        while not stop.is_set():
            steps += 1
            if steps % ACTOR_PERIOD == 0:
                params = self._learner.params()
            epsilon = max(0.05, 1.0 - steps / 2_000)
            explores = rng.random() < epsilon
            action = int(rng.integers(NUM_ACTIONS)) if explores else greedy(params, observation)
            after, reward, terminated, truncated, _ = env.step(action)
            writer.append(
                {
                    "observation": observation,
                    "action": np.int32(action),
                    "reward": np.float32(reward),
                    "discount": np.float32(0.0 if terminated else DISCOUNT),
                    "next_observation": after,
                }
            )
            last = {name: column[-1:] for name, column in writer.history.items()}
            writer.create_item(TABLE, priority=1.0, trajectory=last)
            observation = env.reset()[0] if terminated or truncated else after
            # The rate limiter holds back inserts while the learner is behind.
            while not stop.is_set():
                try:
                    writer.flush(block_until_num_items=10, timeout_ms=TIMEOUT_MS)
                except reverb.DeadlineExceededError:
                    continue
                break


class Evaluator:
    """Plays without exploring, again and again, and stops the program when that goes well."""

    def __init__(self, learner: Learner, target: float, episodes: int, output: Path | None) -> None:
        self._learner = learner
        self._target = target
        self._episodes = episodes
        self._output = output

    def run(self) -> None:
        """Evaluates until the target is reached."""
        import gymnasium

        env, stop = gymnasium.make("CartPole-v1"), lp.stop_event()
        seen = 0
        while not stop.wait(0.2):
            result = self._learner.result(0.0)
            if result.learner_steps < seen + TARGET_PERIOD:
                continue
            seen = result.learner_steps
            params = self._learner.params()
            mean_return = float(np.mean([_play(env, params, i) for i in range(self._episodes)]))
            result = self._learner.result(mean_return)
            print(
                f"learner step {result.learner_steps:6,}   {result.inserts:6,} inserts   "
                f"samples/insert {result.ratio:5.2f}   mean return {mean_return:5.1f}"
            )
            if mean_return >= self._target:
                if self._output is not None:
                    self._output.write_text(json.dumps(asdict(result)), encoding="utf-8")
                lp.stop()
                return


def _play(env: Any, params: Params, seed: int) -> float:
    observation, _ = env.reset(seed=seed)
    total, over = 0.0, False
    while not over:
        observation, reward, terminated, truncated, _ = env.step(greedy(params, observation))
        total, over = total + float(reward), terminated or truncated
    return total


def make_program(
    num_actors: int = 2,
    samples_per_insert: float = 16.0,
    target: float = 150.0,
    episodes: int = 20,
    seed: int = 1,
    output: Path | None = None,
) -> lp.Program:
    """Describes the program; nothing runs yet.

    Args:
        num_actors: How many play at the same time.
        samples_per_insert: How often each transition is sampled, on average.
        target: The program stops at a mean return not below it; 500 is perfect.
        episodes: In each evaluation.
        seed: Of the network and the actors; with processes, runs differ all the same.
        output: Where the result is written as JSON; None: nowhere.

    Raises:
        ValueError: A number is too small, or the target out of reach.
        ImportError: Gymnasium is not installed.
    """
    if num_actors < 1 or episodes < 1 or samples_per_insert <= 0:
        raise ValueError("replay needs at least one actor, one episode and a ratio above 0")
    if target > 500:
        raise ValueError(f"CartPole ends an episode at a return of 500; {target} is out of reach")
    # Of what nodes import inside of functions, launchers ask hosts and images for that which this
    # process has loaded: so who lacks it is refused before anything starts.
    import gymnasium  # noqa: F401 - for its being loaded

    program = lp.Program("replay")
    tables = functools.partial(make_tables, samples_per_insert)
    replay = program.add_node(lp.ReverbNode(tables), label="replay")
    learner = program.add_node(
        lp.CourierNode(Learner, replay, samples_per_insert, seed), label="learner"
    )
    with program.group("actor"):
        for index in range(num_actors):
            program.add_node(lp.PyClassNode(Actor, replay, learner, seed + 1 + index))
    program.add_node(
        lp.PyClassNode(Evaluator, learner, target, episodes, output), label="evaluator"
    )
    return program
