"""A generator and a discriminator in PyTorch, and batch normalisation over all replicas."""

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.parametrizations import spectral_norm

from launchpad_lite import replicas

DIGITS = 10


class CrossReplicaNorm(nn.Module):  # type: ignore[misc]  # PyTorch is optional here
    """Batch normalisation over the batches of all replicas, with a scale and a shift for each digit.

    As each replica has the same number of images, the mean over all is the mean of the replicas'.
    """

    def __init__(self, repl: replicas.Replicator, channels: int, momentum: float = 0.1) -> None:
        super().__init__()
        self._repl = repl
        self._momentum = momentum
        self.scale = nn.Embedding(DIGITS, channels)
        self.shift = nn.Embedding(DIGITS, channels)
        nn.init.ones_(self.scale.weight)
        nn.init.zeros_(self.shift.weight)
        self.register_buffer("mean", torch.zeros(channels))
        self.register_buffer("variance", torch.ones(channels))

    def forward(self, features: Tensor, labels: Tensor) -> Tensor:
        """Returns features of shape (n, channels, height, width); while it trains, replicas wait."""
        mean, variance = self._statistics(features) if self.training else (self.mean, self.variance)
        features = (features - _channels(mean)) * _channels(torch.rsqrt(variance + 1e-5))
        scale, shift = self.scale(labels), self.shift(labels)
        return features * scale[:, :, None, None] + shift[:, :, None, None]

    def _statistics(self, features: Tensor) -> tuple[Tensor, Tensor]:
        mine = torch.stack([features.mean((0, 2, 3)), features.square().mean((0, 2, 3))])
        mean, mean_square = self._repl.all_sum(mine / self._repl.num_replicas, "batch norm")
        variance = (mean_square - mean.square()).clamp(min=0)
        self.mean.lerp_(mean.detach(), self._momentum)
        self.variance.lerp_(variance.detach(), self._momentum)
        return mean, variance


def _channels(values: Tensor) -> Tensor:
    return values[:, None, None]


class Generator(nn.Module):  # type: ignore[misc]
    """Noise and labels to images."""

    def __init__(self, repl: replicas.Replicator, noise_size: int, width: int = 32) -> None:
        super().__init__()
        self._width = width
        self.stem = nn.Linear(noise_size, 2 * width * 4 * 4)
        self.first = CrossReplicaNorm(repl, 2 * width)
        self.middle = nn.ConvTranspose2d(2 * width, width, 4, 2, padding=1)
        self.second = CrossReplicaNorm(repl, width)
        self.last = nn.Conv2d(width, 1, 3, padding=1)

    def forward(self, noise: Tensor, labels: Tensor) -> Tensor:
        """Returns images of shape (n, 1, 8, 8) between -1 and 1."""
        features = self.stem(noise).reshape(-1, 2 * self._width, 4, 4)
        features = functional.relu(self.first(features, labels))
        features = functional.relu(self.second(self.middle(features), labels))
        images: Tensor = self.last(features).tanh()
        return images


class Discriminator(nn.Module):  # type: ignore[misc]
    """Images and labels to scores: high ones for real images of that label.

    Each layer has a spectral norm of 1 (https://arxiv.org/abs/1802.05957); the label comes in as a
    projection (https://arxiv.org/abs/1802.05637).
    """

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            spectral_norm(nn.Conv2d(1, width, 4, 2, padding=1)),
            nn.LeakyReLU(0.1),
            spectral_norm(nn.Conv2d(width, 2 * width, 4, 2, padding=1)),
            nn.LeakyReLU(0.1),
            nn.Flatten(),
            spectral_norm(nn.Linear(2 * width * 2 * 2, 2 * width)),
            nn.LeakyReLU(0.1),
        )
        self.score = spectral_norm(nn.Linear(2 * width, 1))
        self.labels = spectral_norm(nn.Embedding(DIGITS, 2 * width))

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """Returns scores, shape (n,)."""
        features = self.layers(images)
        found: Tensor = self.score(features)[:, 0] + (features * self.labels(labels)).sum(1)
        return found


def discriminator_loss(real: Tensor, generated: Tensor) -> Tensor:
    """Returns the hinge loss of scores of real images and of generated ones."""
    return functional.relu(1 - real).mean() + functional.relu(1 + generated).mean()


def generator_loss(generated: Tensor) -> Tensor:
    """Returns the loss of scores of generated images."""
    return -generated.mean()
