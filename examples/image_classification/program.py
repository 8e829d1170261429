"""Learns to read digits with any of the replicators: the code is the same for all of them.

After the ImageNet experiments of "TF-Replicator: Distributed Machine Learning for Researchers": a
small residual network on the digits that scikit-learn ships, with Nesterov momentum and a rate that
warms up, and falls to a tenth three times.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

import launchpad_lite as lp
from launchpad_lite import replicas


@dataclass(frozen=True)
class Settings:
    """How to train.

    Attributes:
        epochs: How often all replicas together see each image.
        batch: Images in a step, of all replicas together.
        rate: The highest learning rate.
        seed: Of the first weights, and of the order of the images.
    """

    epochs: int = 10
    batch: int = 64
    rate: float = 0.1
    seed: int = 0

    @property
    def steps_per_epoch(self) -> int:
        """How many steps an epoch has; the rest that does not fill a batch is left out."""
        return len(digits()[0]) // self.batch

    def rate_at(self, step: int) -> float:
        """Returns the learning rate: rises over 6 % of the steps, and falls at 30, 60 and 80 %."""
        share = step / (self.epochs * self.steps_per_epoch)
        return (
            self.rate
            * min(1.0, (share + 1e-3) / 0.06)
            * 0.1 ** sum(share >= fall for fall in (0.3, 0.6, 0.8))
        )


@functools.cache
def digits() -> tuple[Any, Any, Any, Any]:
    """Returns images of shape (n, 1, 8, 8) and labels, to train with and to test with."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32).reshape(-1, 1, 8, 8)
    parts = train_test_split(images, labels.astype(np.int64), test_size=0.2, random_state=0)
    train_images, test_images, train_labels, test_labels = parts
    return train_images, train_labels, test_images, test_labels


def batches(settings: Settings, size: int, index: int, step: int) -> Iterator[tuple[Any, Any]]:
    """Yields images and labels from a step on, in an order that depends on the epoch only.

    Args:
        settings: How to train.
        size: How many images a batch has.
        index: Which of the batches of a step is taken.
        step: The first one.
    """
    images, labels, _, _ = digits()
    while True:
        epoch, position = divmod(step, settings.steps_per_epoch)
        order = np.random.default_rng([settings.seed, epoch]).permutation(len(images))
        begin = position * settings.batch + index * size
        chosen = order[begin : begin + size]
        yield images[chosen], labels[chosen]
        step += 1


def train(repl: replicas.Replicator, settings: Settings) -> dict[str, Any]:
    """Trains one replica; returns how well the network reads unseen digits.

    Args:
        repl: The replicator, in a replica.
        settings: How to train.
    """
    classifier = make_classifier(repl, settings.seed)
    repl.keep(**classifier.state)

    pipelines = repl.num_pipelines
    size = settings.batch // pipelines

    def input_fn(index: int, step: int) -> Iterator[tuple[Any, Any]]:
        return batches(settings, size, index, step)

    def step_fn(batch: tuple[Any, Any]) -> Any:
        return classifier.step(*batch, settings.rate_at(repl.step))

    steps = settings.epochs * settings.steps_per_epoch
    curve = [sum(losses) / len(losses) for losses in repl.run(step_fn, input_fn, steps=steps)]
    _, _, images, labels = digits()
    accuracy = float((classifier.predict(images) == labels).mean())
    return {"accuracy": accuracy, "losses": curve, "seconds": repl.report.seconds}


def report(repl: replicas.Replicator, settings: Settings) -> None:
    """Trains one replica, and prints how well the network reads."""
    result = train(repl, settings)
    print(f"reads {result['accuracy']:.1%} of the test images right")


def make_program() -> lp.Program:
    """Returns two replicas that train the network, and print what they have reached."""
    program = lp.Program("image_classification")
    replicas.MultiWorkerReplicator(2).add_to(program, report, Settings(), label="classifier")
    return program


def make_classifier(repl: replicas.Replicator, seed: int) -> Any:
    """Returns the network, in JAX for devices of JAX, in PyTorch for all others."""
    if isinstance(repl, replicas.TpuReplicator):
        from examples.image_classification import jax_classifier

        return jax_classifier.Classifier(repl, seed)
    from examples.image_classification import torch_classifier

    return torch_classifier.Classifier(repl, seed)
