"""Image classification with replicas: prints when the first step ended, and how long steps take."""

import itertools
import json
import sys
import time

import torch

from examples.image_classification.program import Settings, batches
from examples.image_classification.torch_classifier import Classifier
from launchers.hosts import HostsLauncher
from launchpad_lite import replicas


def train(repl, steps, began_at):
    """Returns seconds until the first step had ended, and seconds of each later step."""
    torch.set_num_threads(1)
    settings = Settings(batch=64 * repl.num_replicas)
    classifier = Classifier(repl, 0)
    repl.keep(**classifier.state)

    def step_fn(batch):
        return classifier.step(*batch, 0.1)

    def input_fn(index, step):
        return batches(settings, 64, index, step)

    at = [time.time() for _ in repl.run(step_fn, input_fn, steps=steps)]
    return at[0] - began_at, [after - before for before, after in itertools.pairwise(at)]


class Hosts(HostsLauncher):
    """Hosts that commands reach."""

    description = "hosts of a benchmark"
    interface = 1

    def __init__(self, commands):
        """Takes the command of each host, by its address."""
        super().__init__(sorted(commands))
        self._commands = commands

    def command(self, host, there):
        """Returns the command that runs another one there."""
        return [*self._commands[host.name], *there]


if __name__ == "__main__":
    number, steps = map(int, sys.argv[1:3])
    hosts = json.loads(sys.argv[3])
    repl = replicas.MultiWorkerReplicator(number)
    launcher = Hosts(hosts) if hosts else "local_mp"
    print(json.dumps(repl.launch(train, steps, time.time(), launcher=launcher)))
