"""Proximal policy optimisation (PPO) in numpy, with backpropagation by hand.

Pure mathematics: nothing here knows of nodes, environments or time. All parameters of an agent
are one flat vector, the layers are views into it; so an optimiser step is a few array operations,
parameters travel as one array, and a gradient can be held against finite differences.

Sources: PPO, https://arxiv.org/abs/1707.06347; advantages (GAE), https://arxiv.org/abs/1506.02438;
Adam, https://arxiv.org/abs/1412.6980; which details matter, https://arxiv.org/abs/2005.12729.

Shapes: B is any number of steps, O the size of an observation, A the number of actions.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

#: float32 where it learns; float64 where a test looks at the digits.
Floats = NDArray[np.floating[Any]]
Parameters = Floats


@dataclass(frozen=True)
class Hyperparameters:
    """How PPO learns.

    Attributes:
        discount: Weight of the reward one step later.
        gae_lambda: Weight of the advantage one step later, besides: 0 trusts the critic, 1 the
            returns.
        clip: By how much an update may change the probability of an action, as a ratio.
        epochs: How often each update goes through its steps.
        minibatch: Steps in each gradient.
        learning_rate: Of Adam, at the beginning; it falls linearly to a tenth of it.
        decay_steps: Environment steps until it has fallen.
        entropy: Weight of the entropy bonus.
        max_gradient_norm: Longer gradients are scaled to this length.
    """

    discount: float = 0.99
    gae_lambda: float = 0.95
    clip: float = 0.2
    epochs: int = 6
    minibatch: int = 256
    learning_rate: float = 1e-3
    decay_steps: int = 150_000
    entropy: float = 0.005
    max_gradient_norm: float = 0.5


class Network:
    """A perceptron with two hidden layers of tanh units; the output is linear.

    Args:
        sizes: Of its layers: inputs, hidden, hidden, outputs.
        parameters: Where its weights and biases live, shape (`Network.count(sizes)`,). They are
            shared, not copied: changes to them change the network.
    """

    def __init__(self, sizes: Sequence[int], parameters: Parameters) -> None:
        self._layers: list[tuple[Floats, Floats]] = []
        start = 0
        for inputs, outputs in itertools.pairwise(sizes):
            middle, end = start + inputs * outputs, start + (inputs + 1) * outputs
            weights = parameters[start:middle].reshape(inputs, outputs)
            self._layers.append((weights, parameters[middle:end]))
            start = end

    @staticmethod
    def count(sizes: Sequence[int]) -> int:
        """Returns how many parameters a network of these sizes has."""
        return sum((inputs + 1) * outputs for inputs, outputs in itertools.pairwise(sizes))

    def initialise(self, rng: np.random.Generator, output_scale: float) -> None:
        """Sets orthogonal weights, scaled by sqrt(2), in the last layer by `output_scale`."""
        for weights, biases in self._layers:
            is_last = weights is self._layers[-1][0]
            weights[:] = _orthogonal(rng, *weights.shape)
            weights *= output_scale if is_last else math.sqrt(2)
            biases[:] = 0

    def __call__(self, inputs: Floats) -> Floats:
        """Returns the outputs for one input or many, shape (..., outputs)."""
        return self.activations(inputs)[-1]

    def activations(self, inputs: Floats) -> list[Floats]:
        """Returns the output of each layer, the inputs first."""
        found = [inputs]
        *hidden, (weights, biases) = self._layers
        for inner, inner_biases in hidden:
            found.append(np.tanh(found[-1] @ inner + inner_biases))
        found.append(found[-1] @ weights + biases)
        return found

    def gradient(self, activations: Sequence[Floats], upstream: Floats) -> Floats:
        """Returns the gradient of a loss with respect to the parameters, flat like them.

        Args:
            activations: What `activations` returned for a batch.
            upstream: Gradient of the loss with respect to the outputs, shape (B, outputs).
        """
        pieces: list[Floats] = []
        for index in reversed(range(len(self._layers))):
            inputs = activations[index]
            pieces += [upstream.sum(axis=0), (inputs.T @ upstream).ravel()]
            if index:  # tanh' = 1 - tanh^2
                upstream = (upstream @ self._layers[index][0].T) * (1 - inputs * inputs)
        return np.concatenate(pieces[::-1])


def _orthogonal(rng: np.random.Generator, rows: int, columns: int) -> Floats:
    q, r = np.linalg.qr(rng.standard_normal((max(rows, columns), min(rows, columns))))
    q *= np.sign(np.diag(r))  # without it some rotations are likelier than others
    return q if rows >= columns else q.T


class ActorCritic:
    """A network that chooses actions and one that values observations.

    Args:
        observation_size: O.
        num_actions: A.
        hidden: Units in each hidden layer.
        dtype: Of the parameters.
    """

    def __init__(
        self, observation_size: int, num_actions: int, hidden: int = 64, dtype: Any = np.float32
    ) -> None:
        policy_sizes = (observation_size, hidden, hidden, num_actions)
        value_sizes = (observation_size, hidden, hidden, 1)
        middle = Network.count(policy_sizes)
        #: Shape (P,): first those of the policy, then those of the value.
        self.parameters: Parameters = np.zeros(middle + Network.count(value_sizes), dtype)
        #: Logits of the actions, shape (..., A).
        self.policy = Network(policy_sizes, self.parameters[:middle])
        self._value = Network(value_sizes, self.parameters[middle:])

    def initialise(self, rng: np.random.Generator) -> None:
        """Begins with a policy that is close to uniform, and values close to 0."""
        self.policy.initialise(rng, 0.01)
        self._value.initialise(rng, 1.0)

    def sample(self, observation: Floats, rng: np.random.Generator) -> int:
        """Draws an action for one observation, shape (O,)."""
        logits = self.policy(observation)
        # Gumbel's trick: the largest of the logits, with this noise, follows their softmax.
        return int((logits + rng.gumbel(size=logits.shape)).argmax())

    def best(self, observation: Floats) -> int:
        """Returns the likeliest action for one observation, shape (O,)."""
        return int(self.policy(observation).argmax())

    def values(self, observations: Floats) -> Floats:
        """Returns the expected discounted returns, shape (B,), of observations (B, O)."""
        found: Floats = self._value(observations)[..., 0]
        return found

    def log_probabilities(self, observations: Floats, actions: NDArray[np.int64]) -> Floats:
        """Returns how likely the actions are, shape (B,)."""
        return _of(_log_softmax(self.policy(observations)), actions)

    def loss(self, batch: "Batch", clip: float, entropy: float) -> tuple[float, Floats]:
        """Returns PPO's loss of a batch and its gradient, shape (P,).

        The loss is that of the clipped policy, plus half the squared error of the values, minus
        the weighted entropy, each as the mean over the batch. As policy and value share no
        parameters, the second needs no weight.
        """
        size = len(batch.actions)
        seen = self.policy.activations(batch.observations)
        logs = _log_softmax(seen[-1])
        probabilities = np.exp(logs)
        ratios = np.exp(_of(logs, batch.actions) - batch.log_probabilities)
        plain = ratios * batch.advantages
        clipped = np.clip(ratios, 1 - clip, 1 + clip) * batch.advantages
        entropies = -(probabilities * logs).sum(axis=1)

        valued = self._value.activations(batch.observations)
        errors = valued[-1][:, 0] - batch.returns
        loss = -np.minimum(plain, clipped).mean() - entropy * entropies.mean()
        loss += 0.5 * (errors * errors).mean()

        # d ratio / d logits = ratio (one-hot of the action - probabilities); 0 where it is clipped.
        pull = np.where(plain <= clipped, plain, 0)[:, None]
        upstream = pull * probabilities
        upstream[np.arange(size), batch.actions] -= pull[:, 0]
        # d entropy / d logits = -probability (log probability + entropy)
        upstream += entropy * probabilities * (logs + entropies[:, None])
        gradient = np.concatenate(
            [
                self.policy.gradient(seen, upstream / size),
                self._value.gradient(valued, errors[:, None] / size),
            ]
        )
        return float(loss), gradient


def _log_softmax(logits: Floats) -> Floats:
    shifted = logits - logits.max(axis=-1, keepdims=True)  # exp must not overflow
    logs: Floats = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return logs


def _of(table: Floats, columns: NDArray[np.int64]) -> Floats:
    found: Floats = table[np.arange(len(columns)), columns]
    return found


@dataclass(frozen=True)
class Segment:
    """Steps that one actor made one after the other, over as many episodes as it takes.

    Attributes:
        observations: What the agent saw before each step, shape (B, O).
        actions: What it did, shape (B,).
        rewards: Its rewards, shape (B,).
        next_observations: What it saw after each step, shape (B, O); at the end of an episode the
            last of that, not the first of the next.
        terminated: Whether nothing can follow that step, shape (B,).
        truncated: Whether the episode was cut off there, though more could follow, shape (B,).
    """

    observations: Floats
    actions: NDArray[np.int64]
    rewards: Floats
    next_observations: Floats
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]


@dataclass(frozen=True)
class Batch:
    """Steps to learn from.

    Attributes:
        observations: Shape (B, O).
        actions: Shape (B,).
        log_probabilities: How likely the actions were when they were chosen, shape (B,).
        advantages: How much better they were than expected, shape (B,).
        returns: The right values of the critic, shape (B,).
    """

    observations: Floats
    actions: NDArray[np.int64]
    log_probabilities: Floats
    advantages: Floats
    returns: Floats

    def __getitem__(self, rows: NDArray[np.int64]) -> "Batch":
        return Batch(
            self.observations[rows],
            self.actions[rows],
            self.log_probabilities[rows],
            self.advantages[rows],
            self.returns[rows],
        )


def advantages_of(
    segment: Segment, values: Floats, next_values: Floats, discount: float, gae_lambda: float
) -> Floats:
    """Returns the generalised advantage estimates of a segment, shape (B,).

    Where an episode was cut off, and at the end of the segment, the critic says what would have
    followed; where it terminated, nothing does.

    Args:
        segment: The steps.
        values: The critic's word for `segment.observations`, shape (B,).
        next_values: The same for `segment.next_observations`, shape (B,).
        discount: Weight of the reward one step later.
        gae_lambda: Weight of the advantage one step later, besides.
    """
    surprises = segment.rewards + discount * next_values * ~segment.terminated - values
    weights = discount * gae_lambda * ~(segment.terminated | segment.truncated)
    advantages = np.empty_like(surprises)
    following = 0.0
    for step in reversed(range(len(surprises))):
        following = advantages[step] = surprises[step] + weights[step] * following
    return advantages


class Adam:
    """Adam, in place.

    Args:
        parameters: The parameters to change, shape (P,).
    """

    def __init__(self, parameters: Parameters) -> None:
        self._parameters = parameters
        self._mean = np.zeros_like(parameters)
        self._square = np.zeros_like(parameters)
        self._steps = 0

    def step(self, gradient: Floats, learning_rate: float) -> None:
        """Moves the parameters against the gradient, shape (P,)."""
        self._steps += 1
        self._mean += 0.1 * (gradient - self._mean)
        self._square += 0.001 * (gradient * gradient - self._square)
        rate = learning_rate * math.sqrt(1 - 0.999**self._steps) / (1 - 0.9**self._steps)
        self._parameters -= rate * self._mean / (np.sqrt(self._square) + 1e-8)


class PPO:
    """Improves an agent by the steps it makes. Not thread-safe.

    Args:
        agent: Whose parameters are changed.
        hyperparameters: How.
        rng: Shuffles the steps.
    """

    def __init__(
        self, agent: ActorCritic, hyperparameters: Hyperparameters, rng: np.random.Generator
    ) -> None:
        self._agent = agent
        self._hyper = hyperparameters
        self._rng = rng
        self._adam = Adam(agent.parameters)
        #: Environment steps it has learned from.
        self.steps = 0

    def update(self, segments: Sequence[Segment]) -> None:
        """Learns from steps made with the agent's parameters as they are now."""
        hyper = self._hyper
        batch = self._batch(segments)
        size = len(batch.actions)
        decayed = 1 - 0.9 * min(1.0, self.steps / hyper.decay_steps)
        for _ in range(hyper.epochs):
            order = self._rng.permutation(size)
            for start in range(0, size, hyper.minibatch):
                rows = batch[order[start : start + hyper.minibatch]]
                _, gradient = self._agent.loss(rows, hyper.clip, hyper.entropy)
                norm = float(np.linalg.norm(gradient))
                gradient *= min(1.0, hyper.max_gradient_norm / (norm + 1e-8))
                self._adam.step(gradient, hyper.learning_rate * decayed)
        self.steps += size

    def _batch(self, segments: Sequence[Segment]) -> Batch:
        agent, hyper = self._agent, self._hyper
        advantages: list[Floats] = []
        returns: list[Floats] = []
        for segment in segments:
            values = agent.values(segment.observations)
            next_values = agent.values(segment.next_observations)
            advantages.append(
                advantages_of(segment, values, next_values, hyper.discount, hyper.gae_lambda)
            )
            returns.append(advantages[-1] + values)
        observations = np.concatenate([segment.observations for segment in segments])
        actions = np.concatenate([segment.actions for segment in segments])
        all_advantages = np.concatenate(advantages)
        spread = all_advantages.std() + 1e-8
        return Batch(
            observations,
            actions,
            agent.log_probabilities(observations, actions),
            (all_advantages - all_advantages.mean()) / spread,
            np.concatenate(returns),
        )
