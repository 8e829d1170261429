"""Ray's collective library, in actors. For CPUs it has gloo."""

import sys

import ray
import reductions
import torch
from ray.util import collective


class Ray(reductions.Rank):
    """One rank."""

    def join(self, addresses):  # noqa: ARG002 - the same for all
        """Makes the group."""
        torch.set_num_threads(1)
        collective.init_collective_group(self.size, self.rank, backend="gloo")

    def array(self, nbytes):
        """Returns a tensor."""
        return torch.ones(nbytes // 4)

    def reduce(self, array):
        """Adds in place."""
        collective.allreduce(array)


@ray.remote(num_cpus=0)
class Actor:
    """Where a rank runs."""

    def serve(self, rank, size, address):
        """Does what the starter asks for."""
        reductions.serve_rank(Ray, rank, size, address)


_actors = []


def launch(workers, address):
    """Starts a cluster of one machine, and the actors."""
    environment = {"env_vars": {"PYTHONPATH": sys.path[0]}}
    ray.init(log_to_driver=False, include_dashboard=False, runtime_env=environment)
    for rank in range(workers):
        _actors.append(Actor.remote())
        _actors[-1].serve.remote(rank, workers, address)


if __name__ == "__main__":
    reductions.main(Ray, launch)
