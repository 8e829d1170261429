from pathlib import Path

import numpy as np
import pytest

from examples.gan.program import NOISE_SIZE, Settings, batches, digits
from examples.gan.scoring import frechet_distance, inception_score
from launchpad_lite import replicas
from tests.engines import needs_torch
from tests.examples.running import run_example


def test_the_inception_score_is_the_number_of_classes_that_are_told_apart() -> None:
    assert inception_score(np.tile(np.eye(10), (5, 1))) == pytest.approx(10)
    assert inception_score(np.tile(np.eye(10)[:3], (5, 1))) == pytest.approx(3)
    assert inception_score(np.full((50, 10), 0.1)) == pytest.approx(1)


def test_the_frechet_distance_is_that_of_normal_distributions() -> None:
    rng = np.random.default_rng(0)
    mixed = rng.normal(size=(500, 4)) @ rng.normal(size=(4, 4))
    assert frechet_distance(mixed, mixed) == pytest.approx(0, abs=1e-9)
    assert frechet_distance(mixed, mixed + np.array([1, 2, 0, 0])) == pytest.approx(5)
    # Standard deviations of s and 3 s differ by 2 s along each axis.
    spread = np.trace(np.cov(mixed, rowvar=False))
    centred = mixed - mixed.mean(0)
    assert frechet_distance(centred, 3 * centred) == pytest.approx(4 * spread)


@pytest.mark.slow  # scikit-learn takes a second to load
def test_batches_depend_on_replica_and_step_only() -> None:
    settings = Settings(batch=8)
    first, second = (next(it) for it in [batches(settings, 0, 0)] for _ in range(2))
    assert first["images"].shape == (8, 1, 8, 8)
    assert first["noise"].shape == (2, 8, NOISE_SIZE)
    again = next(batches(settings, 0, 1))
    for name, values in second.items():
        np.testing.assert_array_equal(values, again[name])
    other = next(batches(settings, 1, 0))
    assert not (first["noise"] == other["noise"]).all()


@pytest.mark.slow
def test_images_are_between_what_a_generator_draws() -> None:
    images, labels = digits()
    assert (images.min(), images.max()) == (-1, 1)
    assert images.shape == (len(labels), 1, 8, 8)


def normed_by_torch(features: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns PyTorch's own normalisation of a whole batch, and the gradient of a weighted sum."""
    import torch

    inputs = torch.tensor(features, requires_grad=True)
    found = torch.nn.functional.batch_norm(inputs, None, None, training=True)
    (found * torch.tensor(weights)).sum().backward()
    assert inputs.grad is not None
    return found.detach().numpy(), inputs.grad.numpy()


def normed_in_parts(
    repl: replicas.Replicator, features: np.ndarray, weights: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the same of this replica's part, with what a model keeps for later."""
    import torch

    from examples.gan.networks import CrossReplicaNorm

    norm = CrossReplicaNorm(repl, features.shape[1], momentum=1.0).double()
    size = len(features) // repl.num_replicas
    mine = slice(repl.replica_id * size, (repl.replica_id + 1) * size)
    inputs = torch.tensor(features[mine], requires_grad=True)
    found = norm(inputs, torch.zeros(size, dtype=torch.int64))
    (found * torch.tensor(weights[mine])).sum().backward()
    assert inputs.grad is not None
    return found.detach().numpy(), inputs.grad.numpy(), norm.mean.numpy()


@needs_torch
@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_norm_across_replicas_is_that_of_the_whole_batch(number: int) -> None:
    rng = np.random.default_rng(0)
    features = rng.normal(2.0, 3.0, size=(12, 5, 2, 2))
    weights = rng.normal(size=features.shape)
    repl = replicas.MultiWorkerReplicator(number)
    parts = repl.launch(normed_in_parts, features, weights, launcher="test_mt")
    outputs, gradients = normed_by_torch(features, weights)
    np.testing.assert_allclose(np.concatenate([part[0] for part in parts]), outputs, rtol=1e-9)
    found = np.concatenate([part[1] for part in parts])
    np.testing.assert_allclose(found, gradients, rtol=1e-7, atol=1e-9)
    for part in parts:
        np.testing.assert_allclose(part[2], features.mean((0, 2, 3)), rtol=1e-9)


@needs_torch
@pytest.mark.slow
def test_the_discriminator_has_a_spectral_norm_of_one() -> None:
    import torch

    from examples.gan.networks import Discriminator

    torch.manual_seed(0)
    discriminator = Discriminator(8)
    for _ in range(50):  # each call improves its guess
        discriminator(torch.randn(4, 1, 8, 8), torch.arange(4))
    for layer in (discriminator.score, discriminator.labels, discriminator.layers[0]):
        assert torch.linalg.matrix_norm(layer.weight.flatten(1), 2).item() == pytest.approx(
            1, rel=1e-3
        )


@needs_torch
@pytest.mark.slow
@pytest.mark.xdist_group("training")  # one at a time: each takes all cores
def test_the_script_draws_digits_that_a_classifier_reads(tmp_path: Path) -> None:
    arguments = ("--replicas=2", "--batch=32", "--steps=400", f"--output={tmp_path}")
    done = run_example("gan", *arguments)
    assert done.returncode == 0, done.stderr
    last = done.stdout.splitlines()[-1].split()
    assert last[:3] == ["2", "64", "400"]
    inception, frechet, right = float(last[3]), float(last[4]), float(last[5].rstrip("%"))
    # Uniform noise: 3.2, 540, 10 %.
    assert inception > 6
    assert frechet < 60
    assert right > 60
    assert (tmp_path / "digits-2.png").exists()
    assert (tmp_path / "scores.svg").exists()
