"""Image classification with DistributedDataParallel and gloo: prints the same."""

import contextlib
import itertools
import json
import sys
import tempfile
import time

import torch
from torch import distributed, multiprocessing
from torch.nn import functional

from examples.image_classification.program import Settings, batches
from examples.image_classification.torch_classifier import network


def train(rank, size, steps, began_at, folder, results):
    """Trains one replica."""
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size
    )
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(network())
    optimizer = torch.optim.SGD(
        model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-4
    )
    settings = Settings(batch=64 * size)
    pipeline = batches(settings, 64, rank, 0)
    at = []
    for _ in range(steps):
        images, labels = map(torch.as_tensor, next(pipeline))
        loss = functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses = [torch.zeros(()) for _ in range(size)]
        distributed.all_gather(losses, loss.detach())  # as the replicas do
        at.append(time.time())
    took = [after - before for before, after in itertools.pairwise(at)]
    results.put((at[0] - began_at, took))


if __name__ == "__main__":
    number, steps = map(int, sys.argv[1:])
    results = multiprocessing.get_context("spawn").SimpleQueue()
    began_at = time.time()
    with tempfile.TemporaryDirectory() as folder, contextlib.closing(results):
        context = multiprocessing.spawn(
            train, (number, steps, began_at, folder, results), number, join=False
        )
        found = [results.get() for _ in range(number)]
        context.join()
    print(json.dumps(found))
