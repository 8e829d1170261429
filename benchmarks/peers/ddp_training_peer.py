"""Image classification with DistributedDataParallel and gloo: prints the same."""

import contextlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time

import torch
from torch import distributed, multiprocessing
from torch.nn import functional

from examples.image_classification.program import Settings, batches
from examples.image_classification.torch_classifier import network


def train(rank, size, steps, began_at, folder):
    """Trains one replica; returns seconds until its first step, and of each later one."""
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
    return at[0] - began_at, [after - before for before, after in itertools.pairwise(at)]


def spawned(rank, results, *arguments):
    """Trains one replica on this machine."""
    results.put(train(rank, *arguments))


def on_one_machine(number, *arguments):
    """Returns what all replicas return."""
    results = multiprocessing.get_context("spawn").SimpleQueue()
    with contextlib.closing(results):
        context = multiprocessing.spawn(spawned, (results, number, *arguments), number, join=False)
        found = [results.get() for _ in range(number)]
        context.join()
    return found


def on_hosts(hosts, *arguments):
    """The same, with one replica on each host."""
    ranks = [
        subprocess.Popen(
            [
                *command,
                sys.executable,
                __file__,
                "rank",
                json.dumps([rank, len(hosts), *arguments]),
            ],
            env={**os.environ, "GLOO_SOCKET_IFNAME": "wire"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank, command in enumerate(hosts.values())
    ]
    return [json.loads(rank.communicate()[0].splitlines()[-1]) for rank in ranks]


def main():
    """Plays the starter, or one replica on a host."""
    if sys.argv[1] == "rank":
        print(json.dumps(train(*json.loads(sys.argv[2]))))
        return
    number, steps = map(int, sys.argv[1:3])
    hosts = json.loads(sys.argv[3])
    began_at = time.time()
    with tempfile.TemporaryDirectory() as folder:
        start, where = (on_hosts, hosts) if hosts else (on_one_machine, number)
        print(json.dumps(start(where, steps, began_at, folder)))


if __name__ == "__main__":
    main()
