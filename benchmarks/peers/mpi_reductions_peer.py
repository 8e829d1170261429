"""mpi4py, with Open MPI."""

import subprocess
import sys
from pathlib import Path

import reductions


class Mpi(reductions.Rank):
    """One rank."""

    def address(self):
        """Finds out which rank this is."""
        from mpi4py import MPI

        self._world = MPI.COMM_WORLD
        self._in_place = MPI.IN_PLACE

    def join(self, addresses):
        """Does nothing: MPI has connected them."""

    def reduce(self, array):
        """Adds in place."""
        self._world.Allreduce(self._in_place, array)


def make(rank, size):  # noqa: ARG001 - the same for all
    """Makes a rank, which MPI knows."""
    from mpi4py import MPI

    return Mpi(MPI.COMM_WORLD.Get_rank(), size)


def launch(workers, address):
    """Starts the ranks; Open MPI has more of them than cores yield."""
    mpiexec = Path(sys.executable).parent / "mpiexec"
    options = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", str(workers)]
    run = [sys.executable, sys.argv[0], "-1", str(workers), address]
    subprocess.Popen([mpiexec, *options, *run], stdin=subprocess.DEVNULL)


if __name__ == "__main__":
    reductions.main(make, launch)
