"""A small residual network in PyTorch."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from launchpad_lite import replicas


class Block(nn.Module):  # type: ignore[misc]  # mypy does not read torch
    """Two convolutions, and what went into them."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(outputs) for _ in range(2))
        self.short = (
            nn.Identity()
            if inputs == outputs
            else nn.Conv2d(inputs, outputs, 1, stride, bias=False)
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Returns features."""
        hidden = functional.relu(self.norms[0](self.first(images)))
        return functional.relu(self.norms[1](self.second(hidden)) + self.short(images))


def network(width: int = 16) -> nn.Module:
    """Returns a network: images of shape (n, 1, 8, 8) to scores of shape (n, 10)."""
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        Block(width, width, 1),
        Block(width, 2 * width, 2),
        Block(2 * width, 4 * width, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4 * width, 10),
    )


class Classifier:
    """A network and how it learns, in one replica."""

    def __init__(self, repl: replicas.Replicator, seed: int) -> None:
        torch.set_num_threads(1)  # the replicas share the cores
        torch.manual_seed(seed)
        with repl.context() as self._device:
            self._model = network()
            sgd = torch.optim.SGD(
                self._model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-4
            )
            self._optimizer = repl.wrap_optimizer(sgd, model=self._model)

    @property
    def state(self) -> dict[str, Any]:
        """The state for checkpoints."""
        return {"model": self._model, "optimizer": self._optimizer}

    def step(self, images: Any, labels: Any, rate: float) -> float:
        """Learns from a batch; returns the loss."""
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        scores = self._model(torch.as_tensor(images, device=self._device))
        loss = functional.cross_entropy(scores, torch.as_tensor(labels, device=self._device))
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        return float(loss.detach())

    def predict(self, images: Any) -> Any:
        """Returns the digit on each image, as an array of numpy."""
        self._model.eval()
        with torch.no_grad():
            return self._model(torch.as_tensor(images, device=self._device)).argmax(1).cpu().numpy()
