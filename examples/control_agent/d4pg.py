"""D4PG: networks, losses and targets in PyTorch. Nothing here knows of nodes or of time.

After Barth-Maron et al., "Distributed Distributional Deterministic Policy Gradients" (2018,
https://arxiv.org/abs/1804.08617). The critic gives a distribution of the return, on fixed atoms.

Shapes: B is any number of transitions, O the size of an observation, A of an action, Z the atoms.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Support:
    """The returns that a critic knows.

    Attributes:
        low: The lowest one.
        high: The highest one.
        atoms: How many there are, evenly apart.
    """

    low: float = -60.0
    high: float = 0.0
    atoms: int = 61

    def returns(self) -> Tensor:
        """Returns them, shape (Z,)."""
        return torch.linspace(self.low, self.high, self.atoms)

    def project(self, returns: Tensor, probabilities: Tensor) -> Tensor:
        """Returns the distribution on the atoms that is closest to another one, shape (B, Z).

        Each return gives its probability to the two atoms beside it, the more to the closer one
        (https://arxiv.org/abs/1707.06887).

        Args:
            returns: Of shape (B, Z).
            probabilities: Of these returns, shape (B, Z).
        """
        apart = (self.high - self.low) / (self.atoms - 1)
        returns = returns.clamp(self.low, self.high)
        distances = (returns[:, None, :] - self.returns()[:, None]).abs() / apart
        return (1 - distances).clamp_(min=0).matmul(probabilities[:, :, None])[:, :, 0]


class D4PG:
    """An agent: a policy and a critic, and those that their targets are computed with.

    Attributes:
        policy: Observations to actions between -1 and 1.
        critic: Observations beside actions to logits of the atoms.
        networks: All four, by name.
    """

    def __init__(
        self, observation_size: int, action_size: int, hidden: int, support: Support
    ) -> None:
        self._support = support
        self.policy = _perceptron(observation_size, hidden, action_size).append(nn.Tanh())
        self.critic = _perceptron(observation_size + action_size, hidden, support.atoms)
        self._target_policy = copy.deepcopy(self.policy).requires_grad_(False)
        self._target_critic = copy.deepcopy(self.critic).requires_grad_(False)
        self.networks = nn.ModuleDict(
            {
                "policy": self.policy,
                "critic": self.critic,
                "target_policy": self._target_policy,
                "target_critic": self._target_critic,
            }
        )

    def critic_loss(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Returns how far the critic is from the returns after n steps and its target's beyond.

        Args:
            batch: `observation` and `next_observation`, shape (B, O); `action`, shape (B, A);
                `reward`, of n steps, and `discount`, of what follows them, shape (B,).
        """
        with torch.no_grad():
            after = batch["next_observation"]
            actions = self._target_policy(after)
            probabilities = self._target_critic(torch.cat([after, actions], 1)).softmax(1)
            returns = self._support.returns() * batch["discount"][:, None]
            returns = returns + batch["reward"][:, None]
            wanted = self._support.project(returns, probabilities)
        logits = self.critic(torch.cat([batch["observation"], batch["action"]], 1))
        return functional.cross_entropy(logits, wanted)

    def policy_loss(self, observations: Tensor) -> Tensor:
        """Returns minus the mean return of the policy's actions, as the critic sees it."""
        logits = self.critic(torch.cat([observations, self.policy(observations)], 1))
        return -(logits.softmax(1) @ self._support.returns()).mean()

    def update_targets(self) -> None:
        """Makes the target networks equal to those that learn."""
        self._target_policy.load_state_dict(self.policy.state_dict())
        self._target_critic.load_state_dict(self.critic.state_dict())

    def policy_parameters(self) -> "list[tuple[Any, Any]]":
        """Returns copies of weights, shape (inputs, outputs), and biases of the policy, in numpy."""
        return [
            (layer.weight.detach().cpu().numpy().T.copy(), layer.bias.detach().cpu().numpy().copy())
            for layer in self.policy
            if isinstance(layer, nn.Linear)
        ]


def _perceptron(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, hidden),
        nn.ReLU(),
        nn.Linear(hidden, hidden),
        nn.ReLU(),
        nn.Linear(hidden, outputs),
    )
