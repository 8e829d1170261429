"""How to act: the policy in numpy, which actors start faster with than with PyTorch; n-step returns."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

ENVIRONMENT = "Pendulum-v1"
OBSERVATION_SIZE, ACTION_SIZE = 3, 1
#: Of observations and rewards, so that both are about 1.
OBSERVATION_SCALE = np.array([1, 1, 1 / 8], np.float32)
REWARD_SCALE = 0.1
#: An action of 1 is this torque.
TORQUE = 2.0

Array = np.ndarray[Any, Any]
#: Weights of shape (inputs, outputs) and biases of each layer of a policy.
Parameters = Sequence[tuple[Array, Array]]


def act(parameters: Parameters, observation: Array) -> Array:
    """Returns the policy's action, between -1 and 1, for one observation or many."""
    *hidden, (weights, biases) = parameters
    for inner, inner_biases in hidden:
        observation = np.maximum(observation @ inner + inner_biases, 0)
    action: Array = np.tanh(observation @ weights + biases)
    return action


def play(env: Any, choose: Callable[[Array], Array], seed: int) -> Iterator[tuple[Any, ...]]:
    """Plays an episode; yields what `NStep.add` takes of each step, with the reward as it is.

    Args:
        env: The environment.
        choose: Returns an action for an observation.
        seed: Of the first state.
    """
    observation = env.reset(seed=seed)[0] * OBSERVATION_SCALE
    over = False
    while not over:
        action = choose(observation)
        after, reward, terminated, truncated, _ = env.step(TORQUE * action)
        after, over = after * OBSERVATION_SCALE, terminated or truncated
        yield observation, action, float(reward), after, terminated, over
        observation = after


def mean_return(env: Any, parameters: Parameters, seeds: Sequence[int]) -> float:
    """Returns the mean return of episodes without noise."""

    def choose(observation: Array) -> Array:
        return act(parameters, observation)

    returns = [sum(step[2] for step in play(env, choose, seed)) for seed in seeds]
    return float(np.mean(returns))


class NStep:
    """Makes transitions of n steps from those of one; they end where an episode ends.

    Args:
        steps: n.
        discount: Weight of the reward one step later.
    """

    def __init__(self, steps: int, discount: float) -> None:
        self._steps = steps
        self._discount = discount
        self._seen: list[tuple[Any, Any, float]] = []

    def add(
        self, observation: Any, action: Any, reward: float, after: Any, terminated: bool, over: bool
    ) -> Iterator[dict[str, Any]]:
        """Yields transitions that are complete after a step.

        Args:
            observation: Before the step.
            action: What was done.
            reward: Of the step.
            after: The observation after it.
            terminated: Whether nothing is to be gained any more.
            over: Whether the episode ends here, terminated or not.
        """
        self._seen.append((observation, action, reward))
        while self._seen and (over or len(self._seen) == self._steps):
            first, chosen, _ = self._seen[0]
            rewards = [reward for _, _, reward in self._seen]
            discounts = self._discount ** np.arange(len(rewards) + 1)
            yield {
                "observation": np.float32(first),
                "action": np.float32(chosen),
                "reward": np.float32(rewards @ discounts[:-1]),
                "discount": np.float32(0.0 if terminated else discounts[-1]),
                "next_observation": np.float32(after),
            }
            del self._seen[0]
