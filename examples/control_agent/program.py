"""A control agent: actors, a replay buffer, and a learner that is replicated.

After the D4PG experiments of "TF-Replicator: Distributed Machine Learning for Researchers". Actors
swing up a pendulum and insert their experience into a replay buffer. Replicas of the learner sample
it, and average their gradients. Actors get the newest policy from the learner by calls. An
evaluator stops the program when the policy is good.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import launchpad_lite as lp
from examples.control_agent.acting import (
    ACTION_SIZE,
    ENVIRONMENT,
    OBSERVATION_SIZE,
    REWARD_SCALE,
    NStep,
    Parameters,
    act,
    mean_return,
    play,
)
from examples.control_agent.replay import Replay, Transitions
from launchpad_lite import replicas

#: Seconds between two evaluations, and after which those that wait for the replay buffer look
#: whether the program stops.
LOOK_S = 0.5
#: Transitions that an actor inserts at once.
CHUNK = 20
#: Steps of the learner between two versions of the policy that others can get.
PUBLISH_PERIOD = 20
#: Episodes that are evaluated in the end.
FINAL_EPISODES = 100


@dataclass(frozen=True)
class Settings:
    """How to learn.

    Attributes:
        batch: Transitions in a step, of all replicas of the learner together.
        samples_per_insert: How often each transition is sampled, on average.
        min_size: Transitions in the buffer before the first step.
        n_step: Rewards that are summed before the critic is asked.
        discount: Weight of the reward one step later.
        noise: Standard deviation of what actors add to actions, which are between -1 and 1.
        hidden: Units in each hidden layer.
        rate: Learning rate.
        target_period: Steps between two copies to the target networks.
        target: The mean return at which it ends.
        episodes: Episodes in an evaluation.
        max_seconds: Seconds of learning after which it gives up.
        seed: Of the networks and the actors; runs differ all the same.
    """

    batch: int = 128
    samples_per_insert: float = 64.0
    min_size: int = 500
    n_step: int = 3
    discount: float = 0.98
    noise: float = 0.3
    hidden: int = 64
    rate: float = 1e-3
    target_period: int = 50
    target: float = -200.0
    episodes: int = 10
    max_seconds: float = 300.0
    seed: int = 1


class Policy(NamedTuple):
    """A policy, and when it was learned.

    Attributes:
        step: Of the learner.
        seconds: Since its first step.
        parameters: Of the policy.
    """

    step: int
    seconds: float
    parameters: Parameters


@dataclass(frozen=True)
class Result:
    """How it ended.

    Attributes:
        solved: Whether the target was reached, in the last evaluation and in 100 other episodes.
        curve: Steps, seconds and mean return of each evaluation.
        final_return: Mean return of the last policy in these.
        inserts: Transitions that were inserted.
        samples: Transitions that were sampled.
        ratio: Samples per insert, after the first `min_size` inserts.
    """

    solved: bool
    curve: list[tuple[int, float, float]]
    final_return: float
    inserts: int
    samples: int
    ratio: float


class Learner:
    """One replica of the learner. Others get its policy."""

    def __init__(self, repl: replicas.Replicator, replay: Replay, settings: Settings) -> None:
        import torch

        from examples.control_agent.d4pg import D4PG, Support

        torch.set_num_threads(1)  # the nodes share the cores
        torch.manual_seed(settings.seed)
        self._repl = repl
        self._replay = replay
        self._settings = settings
        with repl.context() as self._device:
            self._agent = D4PG(OBSERVATION_SIZE, ACTION_SIZE, settings.hidden, Support())
            self._critic_optimizer = repl.wrap_optimizer(
                torch.optim.Adam(self._agent.critic.parameters(), settings.rate)
            )
            self._policy_optimizer = repl.wrap_optimizer(
                torch.optim.Adam(self._agent.policy.parameters(), settings.rate)
            )
        self._publish()

    def policy(self) -> Policy:
        """Returns the newest policy."""
        return self._policy

    def run(self) -> None:
        """Learns until the program stops."""
        repl = self._repl
        repl.keep(
            networks=self._agent.networks,
            critic_optimizer=self._critic_optimizer,
            policy_optimizer=self._policy_optimizer,
        )
        self._publish()
        for _ in repl.run(self._step, self._input):
            if repl.step % self._settings.target_period == 0:
                self._agent.update_targets()
            if repl.step % PUBLISH_PERIOD == 0:
                self._publish()

    def _input(self, _: int) -> Callable[[], Transitions]:
        """Returns what samples this replica's part of a batch."""
        number = self._settings.batch // self._repl.num_replicas
        stop = lp.stop_event()

        def sample() -> Transitions:
            while (batch := self._replay.sample(number, LOOK_S)) is None:
                if stop.is_set():  # the actors insert nothing any more
                    raise StopIteration
            return batch

        return sample

    def _step(self, transitions: Transitions) -> dict[str, float]:
        import torch

        agent = self._agent
        batch = {
            name: torch.as_tensor(values, device=self._device)
            for name, values in transitions.items()
        }
        critic_loss = agent.critic_loss(batch)
        self._critic_optimizer.zero_grad()
        critic_loss.backward()
        self._critic_optimizer.step()

        policy_loss = agent.policy_loss(batch["observation"])
        self._policy_optimizer.zero_grad()
        # The gradient goes through the critic, but the critic does not learn from it.
        policy_loss.backward(inputs=list(agent.policy.parameters()))
        self._policy_optimizer.step()
        return {"critic_loss": critic_loss.item(), "policy_loss": policy_loss.item()}

    def _publish(self) -> None:
        # A new object: calls of others come between any two lines of a step.
        repl = self._repl
        self._policy = Policy(repl.step, repl.report.seconds, self._agent.policy_parameters())


class Actor:
    """Explores with the newest policy, and inserts its experience into the replay buffer."""

    def __init__(self, replay: Replay, learner: Learner, settings: Settings, index: int) -> None:
        self._replay = replay
        self._learner = learner
        self._settings = settings
        self._rng = np.random.default_rng([settings.seed, index])

    def run(self) -> None:
        """Plays until the program stops."""
        import gymnasium

        env = gymnasium.make(ENVIRONMENT)
        chunk: list[dict[str, Any]] = []
        parameters = self._learner.policy().parameters

        def explore(observation: Any) -> Any:
            noise = self._rng.normal(0, self._settings.noise, ACTION_SIZE)
            return np.clip(act(parameters, observation) + noise, -1, 1)

        while True:
            n_step = NStep(self._settings.n_step, self._settings.discount)
            for step in play(env, explore, int(self._rng.integers(2**31))):
                observation, action, reward, *rest = step
                chunk += n_step.add(observation, action, REWARD_SCALE * reward, *rest)
                if len(chunk) >= CHUNK:
                    if not self._insert(chunk):
                        return
                    chunk = []
                    parameters = self._learner.policy().parameters

    def _insert(self, chunk: list[dict[str, Any]]) -> bool:
        """Inserts transitions; returns whether the program goes on."""
        transitions = {name: np.stack([each[name] for each in chunk]) for name in chunk[0]}
        stop = lp.stop_event()
        while not stop.is_set() and not self._replay.insert(transitions, LOOK_S):
            pass
        return not stop.is_set()


class Evaluator:
    """Plays without noise, again and again, and stops the program when that goes well."""

    def __init__(
        self, replay: Replay, learner: Learner, settings: Settings, output: Path | None
    ) -> None:
        self._replay = replay
        self._learner = learner
        self._settings = settings
        self._output = output

    def run(self) -> None:
        """Evaluates until the target is reached, or the time is over."""
        import gymnasium

        env, stop = gymnasium.make(ENVIRONMENT), lp.stop_event()
        settings = self._settings
        curve: list[tuple[int, float, float]] = []
        while not stop.wait(LOOK_S):
            policy = self._learner.policy()
            if policy.step == (curve[-1][0] if curve else 0):
                continue
            first = settings.episodes * len(curve)  # other episodes each time
            found = mean_return(env, policy.parameters, range(first, first + settings.episodes))
            curve.append((policy.step, policy.seconds, found))
            print(f"learner step {policy.step:6,}  {policy.seconds:5.1f} s  return {found:7.1f}")
            is_late = policy.seconds >= settings.max_seconds
            if found < settings.target and not is_late:
                continue
            # One of many evaluations is good by luck.
            seeds = range(10**6, 10**6 + FINAL_EPISODES)
            final_return = mean_return(env, policy.parameters, seeds)
            if final_return >= settings.target or is_late:
                self._finish(curve, final_return)
                lp.stop()
                return

    def _finish(self, curve: list[tuple[int, float, float]], final_return: float) -> None:
        inserts, samples = self._replay.counts()
        ratio = samples / max(1, inserts - self._settings.min_size)
        solved = final_return >= self._settings.target
        result = Result(solved, curve, final_return, inserts, samples, ratio)
        if self._output is not None:
            self._output.write_text(json.dumps(asdict(result)), encoding="utf-8")


def make_program(
    num_actors: int = 2,
    num_replicas: int = 2,
    settings: Settings = Settings(),
    output: Path | None = None,
) -> lp.Program:
    """Describes the program; nothing runs yet.

    Args:
        num_actors: How many play at the same time.
        num_replicas: How many replicas the learner has.
        settings: How to learn.
        output: Where the result is written as JSON; None: nowhere.

    Raises:
        ValueError: A number is too small, or the replicas cannot share a batch evenly.
        ImportError: Gymnasium or PyTorch is not installed.
    """
    if num_actors < 1 or num_replicas < 1 or settings.episodes < 1:
        raise ValueError("control_agent needs at least one actor, one replica and one episode")
    if settings.batch % num_replicas:
        raise ValueError(f"{num_replicas} replicas cannot share a batch of {settings.batch} evenly")
    # Of what nodes import inside of functions, launchers ask hosts and images for that which this
    # process has loaded: so who lacks it is refused before anything starts.
    import gymnasium  # noqa: F401 - for its being loaded
    import torch  # noqa: F401

    program = lp.Program("control_agent")
    ratio = settings.samples_per_insert
    slack = max(20 * settings.batch, 4 * CHUNK * ratio)
    replay = program.add_node(
        lp.CourierNode(Replay, 100_000, settings.min_size, ratio, slack, settings.seed),
        label="replay",
    )
    repl = replicas.MultiWorkerReplicator(
        num_replicas, input_replication=replicas.InputReplication.PER_REPLICA
    )
    learner = repl.add_to(program, Learner, replay, settings, label="learner")
    with program.group("actor"):
        for index in range(num_actors):
            program.add_node(lp.PyClassNode(Actor, replay, learner, settings, index))
    program.add_node(
        lp.PyClassNode(Evaluator, replay, learner, settings, output), label="evaluator"
    )
    return program
