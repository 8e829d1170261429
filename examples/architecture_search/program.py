"""Searches for a neural network that reads digits: evolution of convolutional modules.

After Hajewski and Oliveira, "Building Scalable Deep Learning Systems with RPC". A network is a module
several times in a row; between two of them, a 1x1 convolution doubles the filters and a 3x3 max
pooling halves the image. Evolution finds the layers of the module. The data are the digits that
scikit-learn ships, 8x8 pixels each.
"""

import functools
import os
import random
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from launchpad_lite import search

#: Sizes of the kernels of each layer that a module may have.
LAYERS = {
    "1x1": [(1, 1)],
    "3x3": [(3, 3)],
    "3x1-1x3": [(3, 1), (1, 3)],
    "5x5": [(5, 5)],
    "5x1-1x5": [(5, 1), (1, 5)],
}
#: A module has no more layers.
MOST_LAYERS = 5
#: How likely a mutation appends a layer.
APPEND_P = 0.5
#: How often the module stands in a network, and filters of the first one.
MODULES = 2
FILTERS = 8


@dataclass(frozen=True)
class Module:
    """The layers of a module: a genome of the evolution."""

    layers: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.layers)

    def mutate(self, rng: random.Random) -> "Module":
        """Returns it with one more layer, or as it is."""
        if len(self) < MOST_LAYERS and rng.random() < APPEND_P:
            return Module((*self.layers, rng.choice(list(LAYERS))))
        return self

    def crossover(self, other: "Module", rng: random.Random) -> tuple["Module", "Module"]:
        """Returns two that are made of the beginning of one and the end of the other."""
        here, there = rng.randint(1, len(self)), rng.randint(1, len(other))
        one = self.layers[:here] + other.layers[there:]
        two = other.layers[:there] + self.layers[here:]
        return Module(one[:MOST_LAYERS]), Module(two[:MOST_LAYERS])


def first(rng: random.Random) -> Module:
    """Returns a module of one layer."""
    return Module((rng.choice(list(LAYERS)),))


def network(module: Module) -> Any:
    """Returns a network of PyTorch: images of shape (n, 1, 8, 8) to scores of shape (n, 10)."""
    from torch import nn

    def parts() -> Iterator[nn.Module]:
        channels, filters = 1, FILTERS
        for copy in range(MODULES):
            if copy:
                filters *= 2
                yield nn.Conv2d(channels, filters, 1)
                yield nn.MaxPool2d(3, stride=2, padding=1)
                channels = filters
            for layer in module.layers:
                for kernel in LAYERS[layer]:
                    yield nn.Conv2d(channels, filters, kernel, padding="same")
                    channels = filters
                yield nn.ReLU()
        yield nn.AdaptiveAvgPool2d(2)
        yield nn.Flatten()
        yield nn.Linear(4 * channels, 10)

    return nn.Sequential(*parts())


@functools.cache
def digits() -> tuple[Any, Any, Any, Any]:
    """Returns images and labels to train with, and to validate with, as tensors."""
    import torch
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images / 16, dtype=torch.float32).reshape(-1, 1, 8, 8)
    parts = train_test_split(images, torch.tensor(labels), test_size=0.3, random_state=0)
    train_images, test_images, train_labels, test_labels = parts
    return train_images, train_labels, test_images, test_labels


def train(module: Module, *, epochs: int = 6, seed: int = 0, die_p: float = 0.0) -> float:
    """Returns the share of validation images that a network of a module reads right.

    Args:
        module: What it is made of.
        epochs: How often it sees all training images; it reports after each.
        seed: Of its first weights, and of the order of the images.
        die_p: How likely its worker is killed after an epoch, for a demonstration.
    """
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    images, labels, test_images, test_labels = digits()
    model = network(module)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    accuracy = 0.0
    for _ in range(epochs):
        for batch in torch.randperm(len(images)).split(64):
            loss = torch.nn.functional.cross_entropy(model(images[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            accuracy = (model(test_images).argmax(1) == test_labels).float().mean().item()
        search.report(accuracy)
        if random.random() < die_p:
            os.kill(os.getpid(), signal.SIGKILL)
    return accuracy


def make_search(trials: int, epochs: int, seed: int, die_p: float = 0.0) -> search.Model:
    """Returns the evolution of modules."""
    evaluate = functools.partial(train, epochs=epochs, seed=seed, die_p=die_p)
    return search.VariableLengthEvolution(evaluate, first, trials, population=12, seed=seed)
