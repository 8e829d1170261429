"""The same network in JAX: functions of its parameters."""

from typing import Any

import jax
import numpy as np
import optax

from launchpad_lite import replicas

#: Of running means and variances.
_MOMENTUM = 0.9
_SGD = optax.inject_hyperparams(optax.sgd)(0.1, momentum=0.9, nesterov=True)
_STRIDES = {"a": 1, "b": 2, "c": 2}


def first_parameters(seed: int, width: int = 16) -> "dict[str, Any]":
    """Returns the parameters of a network, as arrays of numpy: He's initial weights."""
    rng = np.random.default_rng(seed)

    def convolution(inputs: int, outputs: int, size: int = 3) -> Any:
        scale = np.sqrt(2 / (inputs * size * size))
        return np.float32(scale * rng.normal(size=(outputs, inputs, size, size)))

    def norm(channels: int) -> Any:
        return {"scale": np.ones(channels, np.float32), "shift": np.zeros(channels, np.float32)}

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
    params["weights"] = np.float32(scale * rng.normal(size=(inputs, 10)))
    params["bias"] = np.zeros(10, np.float32)
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


@jax.jit  # type: ignore[untyped-decorator]  # mypy does not read jax
def _changed(params: Any, updates: Any, kept: Any, seen: Any) -> Any:
    """Returns the next parameters, and the next running means and variances."""
    return optax.apply_updates(params, updates), jax.tree.map(
        lambda old, new: _MOMENTUM * old + (1 - _MOMENTUM) * new, kept, seen
    )


@jax.jit  # type: ignore[untyped-decorator]  # mypy does not read jax
def _digits(params: Any, images: Any, statistics: Any) -> Any:
    return scores_of(params, images, statistics)[0].argmax(1)


class Classifier:
    """A network and how it learns, in one replica."""

    def __init__(self, repl: replicas.Replicator, seed: int) -> None:
        params = first_parameters(seed)
        self._optimizer = repl.wrap_optimizer(_SGD._replace(update=jax.jit(_SGD.update)))
        images = np.zeros((1, 1, 8, 8), np.float32)
        _, statistics = jax.eval_shape(lambda params: scores_of(params, images, None), params)
        with repl.context() as self._device:
            optimizer = jax.jit(_SGD.init)(params)
        self.state: dict[str, Any] = {
            "network": {
                "params": params,
                "optimizer": optimizer,
                "statistics": jax.tree.map(
                    lambda seen: np.zeros(seen.shape, seen.dtype), statistics
                ),
            }
        }

    def step(self, images: Any, labels: Any, rate: float) -> float:
        """Learns from a batch; returns the loss."""
        network = self.state["network"]
        # JAX compiles again for arrays that are committed to a device, as averages are. So all are.
        network.update(jax.device_put(network, self._device))
        loss, seen, gradients = _gradients(network["params"], images, labels)
        network["optimizer"].hyperparams["learning_rate"] = np.float32(rate)
        updates, network["optimizer"] = self._optimizer.update(
            gradients, network["optimizer"], network["params"]
        )
        network["params"], network["statistics"] = _changed(
            network["params"], updates, network["statistics"], seen
        )
        return float(loss)

    def predict(self, images: Any) -> Any:
        """Returns the digit on each image, as an array of numpy."""
        network = self.state["network"]
        return np.asarray(_digits(network["params"], images, network["statistics"]))
