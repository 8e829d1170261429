"""The same network in JAX: functions of its parameters."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from launchpad_lite import replicas

#: Of running means and variances.
_MOMENTUM = 0.9
_STRIDES = {"a": 1, "b": 2, "c": 2}


def first_parameters(seed: int, width: int = 16) -> "dict[str, Any]":
    """Returns the parameters of a network: He's initial weights."""
    rng = np.random.default_rng(seed)

    def convolution(inputs: int, outputs: int, size: int = 3) -> Any:
        scale = np.sqrt(2 / (inputs * size * size))
        return jnp.asarray(scale * rng.normal(size=(outputs, inputs, size, size)), jnp.float32)

    def norm(channels: int) -> Any:
        return {"scale": jnp.ones(channels), "shift": jnp.zeros(channels)}

    params: dict[str, Any] = {"stem": convolution(1, width), "norm": norm(width)}
    inputs = width
    for name, outputs in zip(_STRIDES, (width, 2 * width, 4 * width), strict=True):
        params[name] = {
            "first": convolution(inputs, outputs),
            "second": convolution(outputs, outputs),
            "norms": [norm(outputs), norm(outputs)],
        }
        if inputs != outputs:
            params[name]["short"] = convolution(inputs, outputs, 1)
        inputs = outputs
    scale = 1 / np.sqrt(inputs)
    params["weights"] = jnp.asarray(scale * rng.normal(size=(inputs, 10)), jnp.float32)
    params["bias"] = jnp.zeros(10)
    return params


def _convolved(images: Any, kernel: Any, stride: int = 1) -> Any:
    return jax.lax.conv_general_dilated(images, kernel, (stride, stride), "SAME")


def scores_of(params: Any, images: Any, statistics: Any) -> "tuple[Any, Any]":
    """Returns scores of shape (n, 10), and the mean and variance of each channel in each layer.

    Args:
        params: Of the network.
        images: Of shape (n, 1, 8, 8).
        statistics: Means and variances to use, in order; None: those of the images.
    """
    seen: list[Any] = []

    def normed(features: Any, norm: Any) -> Any:
        here = features.mean((0, 2, 3)), features.var((0, 2, 3))
        mean, variance = here if statistics is None else statistics[len(seen)]
        seen.append(here)
        scale = norm["scale"] * jax.lax.rsqrt(variance + 1e-5)
        return (features - mean[:, None, None]) * scale[:, None, None] + norm["shift"][
            :, None, None
        ]

    features = jax.nn.relu(normed(_convolved(images, params["stem"]), params["norm"]))
    for name, stride in _STRIDES.items():
        block = params[name]
        hidden = jax.nn.relu(
            normed(_convolved(features, block["first"], stride), block["norms"][0])
        )
        hidden = normed(_convolved(hidden, block["second"]), block["norms"][1])
        short = _convolved(features, block["short"], stride) if "short" in block else features
        features = jax.nn.relu(hidden + short)
    return features.mean((2, 3)) @ params["weights"] + params["bias"], seen


@jax.jit  # type: ignore[untyped-decorator]  # mypy does not read jax
def _gradients(params: Any, images: Any, labels: Any) -> Any:
    def loss_of(params: Any) -> Any:
        scores, statistics = scores_of(params, images, None)
        losses = optax.softmax_cross_entropy_with_integer_labels(scores, labels)
        return losses.mean(), statistics

    (loss, statistics), gradients = jax.value_and_grad(loss_of, has_aux=True)(params)
    return loss, statistics, gradients


class Classifier:
    """A network and how it learns, in one replica."""

    def __init__(self, repl: replicas.Replicator, seed: int) -> None:
        self._sgd = optax.inject_hyperparams(optax.sgd)(0.1, momentum=0.9, nesterov=True)
        with repl.context():
            params = first_parameters(seed)
            self._optimizer = repl.wrap_optimizer(self._sgd)
            _, statistics = scores_of(params, jnp.zeros((1, 1, 8, 8)), None)
        self.state: dict[str, Any] = {
            "network": {
                "params": params,
                "optimizer": self._sgd.init(params),
                "statistics": jax.tree.map(jnp.zeros_like, statistics),
            }
        }

    def step(self, images: Any, labels: Any, rate: float) -> float:
        """Learns from a batch; returns the loss."""
        network = self.state["network"]
        loss, statistics, gradients = _gradients(network["params"], images, labels)
        network["optimizer"].hyperparams["learning_rate"] = jnp.asarray(rate)
        updates, network["optimizer"] = self._optimizer.update(
            gradients, network["optimizer"], network["params"]
        )
        network["params"] = optax.apply_updates(network["params"], updates)
        network["statistics"] = jax.tree.map(
            lambda kept, new: _MOMENTUM * kept + (1 - _MOMENTUM) * new,
            network["statistics"],
            statistics,
        )
        return float(loss)

    def predict(self, images: Any) -> Any:
        """Returns the digit on each image, as an array of numpy."""
        network = self.state["network"]
        scores, _ = scores_of(network["params"], images, network["statistics"])
        return np.asarray(scores.argmax(1))
