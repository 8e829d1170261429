"""Learns to draw digits: a generative adversarial network with larger batches by more replicas.

After the SN-GAN experiments of "TF-Replicator: Distributed Machine Learning for Researchers": a
generator and a discriminator, each with its loss and optimizer, on the digits that scikit-learn ships.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

import launchpad_lite as lp
from launchpad_lite import replicas

NOISE_SIZE = 32
#: Images that are drawn for a score.
SAMPLES = 2000
#: By how much the network that draws moves to the generator in a step.
AVERAGE_RATE = 0.02

Batch = dict[str, "np.ndarray[Any, Any]"]


@dataclass(frozen=True)
class Settings:
    """How to train.

    Attributes:
        steps: How many; each is one of the discriminator and one of the generator.
        batch: Images in a step of each replica.
        generator_rate: Learning rate.
        discriminator_rate: Learning rate.
        sample_period: Steps between two times that images are drawn.
        seed: Of the first weights, the noise, and the order of the images.
    """

    steps: int = 600
    batch: int = 64
    generator_rate: float = 1e-3
    discriminator_rate: float = 2e-3
    sample_period: int = 150
    seed: int = 0


@functools.cache
def digits() -> tuple[Any, Any]:
    """Returns images of shape (n, 1, 8, 8) between -1 and 1, and labels."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return (images / 8 - 1).astype(np.float32).reshape(-1, 1, 8, 8), labels.astype(np.int64)


def batches(settings: Settings, index: int, step: int) -> Iterator[Batch]:
    """Yields what a replica trains with from a step on: real images, and noise for generated ones.

    Args:
        settings: How to train.
        index: Of the replica.
        step: The first one.
    """
    images, labels = digits()
    size = settings.batch
    while True:
        rng = np.random.default_rng([settings.seed, index, step])
        chosen = rng.choice(len(images), size, replace=False)
        yield {
            "images": images[chosen],
            "labels": labels[chosen],
            "noise": rng.normal(size=(2, size, NOISE_SIZE)).astype(np.float32),
        }
        step += 1


def train(repl: replicas.Replicator, settings: Settings) -> dict[str, Any]:
    """Trains one replica; returns what it has drawn, by step, and how long the training took.

    Args:
        repl: The replicator, in a replica.
        settings: How to train.
    """
    import torch

    from examples.gan.networks import Discriminator, Generator, discriminator_loss, generator_loss

    torch.set_num_threads(1)  # the replicas share the cores
    torch.manual_seed(settings.seed)
    with repl.context() as device:
        generator, averaged = Generator(repl, NOISE_SIZE), Generator(repl, NOISE_SIZE)
        averaged.load_state_dict(generator.state_dict())
        discriminator = Discriminator()
        generator_optimizer = repl.wrap_optimizer(
            torch.optim.Adam(generator.parameters(), settings.generator_rate, (0.0, 0.9))
        )
        discriminator_optimizer = repl.wrap_optimizer(
            torch.optim.Adam(discriminator.parameters(), settings.discriminator_rate, (0.0, 0.9))
        )
    repl.keep(
        generator=generator,
        averaged=averaged,
        discriminator=discriminator,
        generator_optimizer=generator_optimizer,
        discriminator_optimizer=discriminator_optimizer,
    )

    def step_fn(batch: Batch) -> dict[str, float]:
        images, labels, noise = (torch.as_tensor(each, device=device) for each in batch.values())
        with torch.no_grad():
            generated = generator(noise[0], labels)
        d_loss = discriminator_loss(discriminator(images, labels), discriminator(generated, labels))
        discriminator_optimizer.zero_grad()
        d_loss.backward()
        discriminator_optimizer.step()

        g_loss = generator_loss(discriminator(generator(noise[1], labels), labels))
        generator_optimizer.zero_grad()
        # The gradient goes through the discriminator, which does not learn from it.
        g_loss.backward(inputs=list(generator.parameters()))
        generator_optimizer.step()
        return {"discriminator": d_loss.item(), "generator": g_loss.item()}

    def input_fn(index: int, step: int) -> Iterator[Batch]:
        return batches(settings, index, step)

    drawn: dict[int, Any] = {}
    for _ in repl.run(step_fn, input_fn, steps=settings.steps):
        # The generator oscillates; its mean over the last steps draws better.
        for mean, newest in zip(
            averaged.state_dict().values(), generator.state_dict().values(), strict=True
        ):
            mean.lerp_(newest, AVERAGE_RATE)
        is_due = repl.step % settings.sample_period == 0 or repl.step == settings.steps
        if is_due and repl.replica_id == 0:
            drawn[repl.step] = draw_digits(averaged)
    return {"drawn": drawn, "seconds": repl.report.seconds}


def draw_digits(generator: Any) -> Any:
    """Returns images, shape (`SAMPLES`, 1, 8, 8), in numpy: the digits 0 to 9 again and again."""
    import torch

    noise = np.random.default_rng(0).normal(size=(SAMPLES, NOISE_SIZE)).astype(np.float32)
    generator.eval()  # no statistics of this batch: the other replicas do not draw
    device = next(generator.parameters()).device
    with torch.no_grad():
        images = generator(
            torch.as_tensor(noise, device=device), torch.as_tensor(drawn_labels(), device=device)
        )
    return images.cpu().numpy()


def drawn_labels() -> Any:
    """Returns which digits `draw_digits` draws, shape (`SAMPLES`,)."""
    return np.arange(SAMPLES) % 10


def report(repl: replicas.Replicator, settings: Settings) -> None:
    """Trains one replica; the first prints how good the digits are that it draws."""
    from examples.gan.scoring import score

    result = train(repl, settings)
    if repl.replica_id == 0:
        found = score(result["drawn"][settings.steps], drawn_labels())
        print(f"draws digits: Frechet distance {found.frechet:.2f}, {found.right:.1%} right")


def make_program(num_replicas: int = 2, steps: int = Settings.steps) -> lp.Program:
    """Returns replicas that train the networks together, and print what they have reached.

    Args:
        num_replicas: How many.
        steps: How long they train.
    """
    program = lp.Program("gan")
    repl = replicas.MultiWorkerReplicator(num_replicas)
    repl.add_to(program, report, Settings(steps), label="gan")
    return program
