"""Actors and a learner: Listings 7 and 11 of the Launchpad paper, with PPO as the algorithm.

Actors balance a pole on a cart (CartPole-v1 of Gymnasium) with the newest parameters and send what
happened to the learner. A call of theirs is answered when the learner has heard from all of them
and made an update, and the answer is the new parameters: all learn in step, no actor uses old
ones. An evaluator plays without chance meanwhile, and stops the program when the task is solved.
"""

import collections
import json
import os
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import launchpad_lite as lp

# On few cores the threads of numpy's BLAS, which small matrices do not need, wait for one another
# and for the nodes: updates take ten times as long. Read when numpy is loaded, here or in a worker.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np

from examples.actor_learner.ppo import PPO, ActorCritic, Hyperparameters, Parameters, Segment

ENVIRONMENT = "CartPole-v1"
OBSERVATION_SIZE = 4
NUM_ACTIONS = 2
#: Of an episode: a reward of 1 a step, for 500 steps at most.
HIGHEST_RETURN = 500.0

RESULT_FILE = "result.json"

#: The training return is the mean of so many episodes.
_RECENT_EPISODES = 20
#: How soon the evaluator sees that there are new parameters.
_POLL_S = 0.02


@dataclass(frozen=True)
class Experience:
    """The experience of an actor between two updates.

    Attributes:
        actor: Which one.
        segment: Its steps.
        returns: Of the episodes that ended meanwhile.
    """

    actor: int
    segment: Segment
    returns: list[float]


@dataclass(frozen=True)
class Snapshot:
    """The parameters after an update.

    Attributes:
        updates: How many there were.
        parameters: Of an `ActorCritic`, shape (P,).
    """

    updates: int
    parameters: Parameters


@dataclass(frozen=True)
class Progress:
    """How far the program is.

    Attributes:
        updates: How often the parameters were updated.
        steps: Environment steps of all actors until then.
        training_return: Mean of the actors' last episodes; None before one has ended.
        evaluation_return: What the evaluator measured last; None before it has.
        seconds: Since the learner was there.
    """

    updates: int
    steps: int
    training_return: float | None
    evaluation_return: float | None
    seconds: float


@dataclass(frozen=True)
class Evaluation:
    """What the evaluator measured.

    Attributes:
        updates: After which update.
        steps: Environment steps of all actors until then.
        mean_return: Of the episodes it played.
        episodes: How many; fewer than asked for if the target was out of reach after them.
        seconds: When that was known, since the learner was there.
    """

    updates: int
    steps: int
    mean_return: float
    episodes: int
    seconds: float


@dataclass(frozen=True)
class Result:
    """The result of the program.

    Attributes:
        solved: Whether the target was reached; otherwise the time was up or it was stopped.
        target: The mean return that was asked for.
        updates: After which update it was reached, or how many there were.
        steps: Environment steps of all actors until then.
        seconds: When that was known, since the learner was there.
        curve: The progress after each update.
        evaluations: In their order; the last is the one that reached the target.
    """

    solved: bool
    target: float
    updates: int
    steps: int
    seconds: float
    curve: list[Progress]
    evaluations: list[Evaluation]


class Learner:
    """Improves the parameters with the experience of the actors. Only serves: actors call it.

    Args:
        num_actors: How many it hears from before each update.
        seed: Decides the first parameters and the order in which it learns.
    """

    def __init__(self, num_actors: int, seed: int) -> None:
        rng = np.random.default_rng([seed, 0])
        self._agent = ActorCritic(OBSERVATION_SIZE, NUM_ACTIONS)
        self._agent.initialise(rng)
        self._ppo = PPO(self._agent, Hyperparameters(), rng)
        self._returns: collections.deque[float] = collections.deque(maxlen=_RECENT_EPISODES)
        self._curve: list[Progress] = []
        self._evaluations: list[Evaluation] = []
        self._start = time.monotonic()
        self._num_actors = num_actors
        #: By actor: one that was lost and starts again sends its experience again.
        self._experiences: dict[int, Experience] = {}
        # Held during an update, so that no actor gets unfinished parameters, or some that are soon old.
        self._updated = threading.Condition()
        self._newest = self._snapshot(0)
        self._stopping = threading.Event()
        # An actor that waits for one that has ended already would wait for ever.
        lp.register_stop_handler(self._release_actors)

    def newest(self) -> Snapshot:
        """Returns the parameters; during an update those that come out of it."""
        with self._updated:
            return self._newest

    def exchange(self, experience: Experience) -> Parameters | None:
        """Takes experience of an actor; returns new parameters once all actors have sent theirs.

        None when the program stops.
        """
        with self._updated:
            if self._stopping.is_set():
                return None
            before = self._newest.updates
            self._experiences[experience.actor] = experience
            if len(self._experiences) == self._num_actors:
                self._update()
                self._updated.notify_all()
            else:
                self._updated.wait_for(
                    lambda: self._newest.updates > before or self._stopping.is_set()
                )
            return None if self._stopping.is_set() else self._newest.parameters

    def report(self, updates: int, returns: Sequence[float]) -> Evaluation:
        """Takes the measurement of the evaluator after an update."""
        mean = statistics.fmean(returns)
        with self._updated:
            steps = self._curve[updates - 1].steps if updates else 0
            found = Evaluation(updates, steps, mean, len(returns), self._seconds())
            self._evaluations.append(found)
        return found

    def progress(self) -> Progress:
        """Returns how far it is, without waiting for an update."""
        curve = self._curve
        last = curve[-1] if curve else None
        return Progress(
            last.updates if last else 0,
            last.steps if last else 0,
            last.training_return if last else None,
            self._evaluation_return(),
            self._seconds(),
        )

    def history(self) -> tuple[list[Progress], list[Evaluation]]:
        """Returns the progress after each update, and all evaluations."""
        with self._updated:
            return list(self._curve), list(self._evaluations)

    def _update(self) -> None:
        # In the order of the actors, not of arrival: the same seed learns the same.
        experiences = [self._experiences[actor] for actor in sorted(self._experiences)]
        self._experiences.clear()
        self._ppo.update([experience.segment for experience in experiences])
        for experience in experiences:
            self._returns.extend(experience.returns)
        self._newest = self._snapshot(self._newest.updates + 1)
        self._curve.append(
            Progress(
                self._newest.updates,
                self._ppo.steps,
                statistics.fmean(self._returns) if self._returns else None,
                self._evaluation_return(),
                self._seconds(),
            )
        )

    def _release_actors(self) -> None:
        with self._updated:
            self._stopping.set()
            self._updated.notify_all()

    def _snapshot(self, updates: int) -> Snapshot:
        return Snapshot(updates, self._agent.parameters.copy())

    def _evaluation_return(self) -> float | None:
        evaluations = self._evaluations
        return evaluations[-1].mean_return if evaluations else None

    def _seconds(self) -> float:
        return time.monotonic() - self._start


class Actor:
    """Acts with the newest parameters, and sends its experience to the learner.

    It has no state but its environment: one that is lost may simply be started again.

    Args:
        index: Which of the actors it is.
        learner: Whom it tells.
        num_steps: Environment steps between two updates.
        seed: Decides, with the index, what it tries.
    """

    # A handle becomes a client; annotated with the class it stands for, each call is checked.
    def __init__(self, index: int, learner: Learner, num_steps: int, seed: int) -> None:
        self._index = index
        self._learner = learner
        self._num_steps = num_steps
        self._agent = ActorCritic(OBSERVATION_SIZE, NUM_ACTIONS)
        self._rng = np.random.default_rng([seed, 1, index])
        self._environment = make_environment()
        self._observation, _ = self._environment.reset(seed=int(self._rng.integers(2**31)))
        self._return = 0.0

    def run(self) -> None:
        """Acts until the program stops, as the learner says or since the call is refused."""
        parameters: Parameters | None = self._learner.newest().parameters
        while parameters is not None:
            self._agent.parameters[:] = parameters
            parameters = self._learner.exchange(self.act())

    def act(self) -> Experience:
        """Makes `num_steps` steps, over as many episodes as it takes."""
        size = self._num_steps
        observations = np.empty((size, OBSERVATION_SIZE), np.float32)
        next_observations = np.empty_like(observations)
        actions = np.empty(size, np.int64)
        rewards = np.empty(size, np.float32)
        terminated, truncated = np.empty(size, np.bool_), np.empty(size, np.bool_)
        returns: list[float] = []
        for step in range(size):
            action = self._agent.sample(self._observation, self._rng)
            observations[step], actions[step] = self._observation, action
            self._observation, reward, is_over, is_cut, _ = self._environment.step(action)
            next_observations[step], rewards[step] = self._observation, reward
            terminated[step], truncated[step] = is_over, is_cut
            self._return += reward
            if is_over or is_cut:
                returns.append(self._return)
                self._return = 0.0
                self._observation, _ = self._environment.reset()
        segment = Segment(observations, actions, rewards, next_observations, terminated, truncated)
        return Experience(self._index, segment, returns)


class Evaluator:
    """Plays episodes with the likeliest actions, until the mean return reaches the target.

    Args:
        learner: Whose parameters it plays with.
        target: Mean return of the episodes that solves the task.
        episodes: How many, one after the other with the same parameters.
        max_seconds: It gives up after them.
        seed: Decides how the episodes begin.
        output: Folder for the result; None prints it.
    """

    def __init__(
        self,
        learner: Learner,
        target: float,
        episodes: int,
        max_seconds: float,
        seed: int,
        output: Path | None,
    ) -> None:
        self._learner = learner
        self._target = target
        self._episodes = episodes
        self._max_seconds = max_seconds
        self._output = output
        self._agent = ActorCritic(OBSERVATION_SIZE, NUM_ACTIONS)
        self._environment = make_environment()
        rng = np.random.default_rng([seed, 2])
        self._environment.reset(seed=int(rng.integers(2**31)))

    def run(self) -> None:
        """Evaluates until the task is solved or the time is up; then stops the program."""
        self._deadline = time.monotonic() + self._max_seconds
        solution: Evaluation | None = None
        evaluated = -1
        while solution is None and not self._is_over():
            snapshot = self._learner.newest()
            if snapshot.updates == evaluated:
                lp.wait_for_stop(_POLL_S)
                continue
            evaluated = snapshot.updates
            self._agent.parameters[:] = snapshot.parameters
            if returns := self._play():
                evaluation = self._learner.report(evaluated, returns)
                if len(returns) == self._episodes and evaluation.mean_return >= self._target:
                    solution = evaluation
        self._finish(solution)
        lp.stop()

    def _is_over(self) -> bool:
        return lp.stop_event().is_set() or time.monotonic() >= self._deadline

    def _play(self) -> list[float]:
        """Returns the returns of episodes: all, or as many as show that the target is missed."""
        returns: list[float] = []
        # What may be missing from the highest return before the target is out of reach.
        reserve = self._episodes * (HIGHEST_RETURN - self._target)
        while len(returns) < self._episodes and reserve >= 0:
            if self._is_over():
                return []
            returns.append(self._play_one())
            reserve -= HIGHEST_RETURN - returns[-1]
        return returns

    def _play_one(self) -> float:
        environment, agent = self._environment, self._agent
        observation, _ = environment.reset()
        total, is_done = 0.0, False
        while not is_done:
            observation, reward, is_over, is_cut, _ = environment.step(agent.best(observation))
            total += reward
            is_done = is_over or is_cut
        return total

    def _finish(self, solution: Evaluation | None) -> None:
        curve, evaluations = self._learner.history()
        end = solution or (curve[-1] if curve else Progress(0, 0, None, None, 0.0))
        result = Result(
            solution is not None,
            self._target,
            end.updates,
            end.steps,
            end.seconds,
            curve,
            evaluations,
        )
        if self._output is None:
            print(table(result))
            return
        self._output.mkdir(parents=True, exist_ok=True)
        text = json.dumps(asdict(result), indent=1)
        (self._output / RESULT_FILE).write_text(text, encoding="utf-8")


def make_environment() -> Any:
    """Returns an environment of Gymnasium: observations of shape (4,), actions 0 and 1."""
    # Loaded only by nodes that act.
    import gymnasium

    # The checker looks at each step of an environment that is known to be right.
    return gymnasium.make(ENVIRONMENT, disable_env_checker=True)


def read_result(folder: Path) -> Result:
    """Returns the result that a program left in its output folder.

    Raises:
        FileNotFoundError: There is none.
    """
    found = json.loads((folder / RESULT_FILE).read_text(encoding="utf-8"))
    curve = [Progress(**each) for each in found.pop("curve")]
    evaluations = [Evaluation(**each) for each in found.pop("evaluations")]
    return Result(**found, curve=curve, evaluations=evaluations)


def table(result: Result) -> str:
    """Returns the result as a table."""
    last = result.evaluations[-1] if result.evaluations else None
    rows = {
        "target": f"{result.target:g} {'reached' if result.solved else 'NOT reached'}",
        "mean return": f"{last.mean_return:.1f} in {last.episodes} episodes" if last else "unknown",
        "environment steps": f"{result.steps:,}",
        "updates": f"{result.updates:,}",
        "seconds": f"{result.seconds:.1f}",
    }
    return "\n".join(f"{name:<18} {value}" for name, value in rows.items())


def make_program(
    num_actors: int = 2,
    seed: int = 1,
    output: Path | None = None,
    *,
    target: float = 475.0,
    episodes: int = 100,
    max_seconds: float = 300.0,
    steps_per_update: int = 2048,
) -> lp.Program:
    """Describes the program; nothing runs yet.

    Args:
        num_actors: How many act at the same time.
        seed: Decides, with the number of actors, what is learned; not when it is evaluated.
        output: Folder for `RESULT_FILE`, made if missing; None prints the result.
        target: Mean return that solves the task, 500 at most.
        episodes: Over how many episodes.
        max_seconds: The program gives up after them.
        steps_per_update: Environment steps of all actors together for each update.

    Raises:
        ValueError: A number is too small, or the target cannot be reached.
        ImportError: Gymnasium is not installed.
    """
    if num_actors < 1 or steps_per_update < num_actors:
        raise ValueError(
            f"actor_learner needs at least one actor, and a step of each for an update, "
            f"not {num_actors} actors and {steps_per_update} steps"
        )
    if episodes < 1 or not max_seconds > 0:
        raise ValueError(
            f"actor_learner needs at least one episode to evaluate and some time, "
            f"not {episodes} episodes and {max_seconds} s"
        )
    if not target <= HIGHEST_RETURN:
        raise ValueError(f"{ENVIRONMENT} returns {HIGHEST_RETURN:g} at most, never {target:g}")
    if seed < 0:
        raise ValueError(f"a seed is 0 or more, not {seed}")
    # Of what nodes import inside of functions, launchers ask hosts and images for that which this
    # process has loaded: so who lacks it is refused before anything starts.
    import gymnasium  # noqa: F401 - for its being loaded

    program = lp.Program("actor_learner")
    # All actors may wait at the same time, each in a thread, while others want something, too.
    threads = {"thread_pool_size": num_actors + 4}
    learner = program.add_node(
        lp.CourierNode(Learner, num_actors, seed, courier_kwargs=threads), label="learner"
    )
    with program.group("actor"):
        for index in range(num_actors):
            num_steps = steps_per_update // num_actors
            program.add_node(lp.CourierNode(Actor, index, learner, num_steps, seed))
    program.add_node(
        lp.CourierNode(Evaluator, learner, target, episodes, max_seconds, seed, output),
        label="evaluator",
    )
    return program
