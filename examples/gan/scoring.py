"""How good generated digits are, as a classifier of digits sees them.

Both scores are those of the literature with another network in Inception's place: a small one, which
is trained here. So they compare runs of this example, and say nothing beside scores of others.
"""

import functools
from typing import Any, NamedTuple

import numpy as np

from examples.gan.program import digits

Array = np.ndarray[Any, Any]


class Score(NamedTuple):
    """How good images are.

    Attributes:
        inception: From 1 to 10: each image is clearly one digit, and all digits are there
            (https://arxiv.org/abs/1606.03498).
        frechet: 0 for the features of real images (https://arxiv.org/abs/1706.08500).
        right: The share of images that are read as the digits they were made for.
    """

    inception: float
    frechet: float
    right: float


def score(images: Array, labels: Array) -> Score:
    """Returns how good images are.

    Args:
        images: Of shape (n, 1, 8, 8), between -1 and 1.
        labels: The digits they were made for, shape (n,).
    """
    probabilities, features = _seen(images)
    real_features = _seen(digits()[0])[1]
    return Score(
        inception_score(probabilities),
        frechet_distance(features, real_features),
        float((probabilities.argmax(1) == labels).mean()),
    )


def inception_score(probabilities: Array) -> float:
    """Returns the score of predictions, shape (n, classes): 1 at least, the classes at most."""
    logs = np.log(probabilities + 1e-12)
    marginal = np.log(probabilities.mean(0) + 1e-12)
    return float(np.exp((probabilities * (logs - marginal)).sum(1).mean()))


def frechet_distance(one: Array, other: Array) -> float:
    """Returns how far features, shapes (n, d) and (m, d), are apart, as normal distributions."""
    covariance, other_covariance = np.cov(one, rowvar=False), np.cov(other, rowvar=False)
    root = _square_root(covariance)
    product = _square_root(root @ other_covariance @ root)
    apart = np.square(one.mean(0) - other.mean(0)).sum()
    return float(apart + np.trace(covariance) + np.trace(other_covariance) - 2 * np.trace(product))


def _square_root(matrix: Array) -> Array:
    """Returns the root of a symmetric matrix without negative eigenvalues."""
    values, vectors = np.linalg.eigh(matrix)
    root: Array = (vectors * np.sqrt(np.maximum(values, 0))) @ vectors.T
    return root


def _seen(images: Array) -> tuple[Array, Array]:
    """Returns the classifier's predictions for images, and its features of them."""
    import torch

    features_of, scores_of = _classifier()
    with torch.no_grad():
        features = features_of(torch.as_tensor(images))
        probabilities = scores_of(features).softmax(1)
    return probabilities.double().numpy(), features.double().numpy()


@functools.cache
def _classifier() -> tuple[Any, Any]:
    """Returns a network in two parts, images to features to scores, which reads digits."""
    import torch
    from torch import nn

    torch.set_num_threads(1)  # with batches so small, more would wait for each other
    images, labels = map(torch.as_tensor, digits())
    with torch.random.fork_rng():
        torch.manual_seed(0)
        features_of = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, 2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(32 * 4 * 4, 32),
            nn.ReLU(),
        )
        scores_of = nn.Linear(32, 10)
        network = nn.Sequential(features_of, scores_of)
        optimizer = torch.optim.Adam(network.parameters(), 2e-3, weight_decay=1e-4)
        for _ in range(10):
            for batch in torch.randperm(len(images)).split(64):
                loss = nn.functional.cross_entropy(network(images[batch]), labels[batch])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    return features_of, scores_of
