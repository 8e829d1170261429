"""torch.distributed with gloo."""

import os

import reductions
import torch
from torch import distributed


class Gloo(reductions.Rank):
    """One rank."""

    def address(self):
        """Returns the port of the store, if it is here."""
        torch.set_num_threads(1)
        if self.rank == 0:
            self._store = distributed.TCPStore(
                reductions.HOST, 0, self.size, is_master=True, wait_for_workers=False
            )
            return reductions.HOST, self._store.port
        return None

    def join(self, addresses):
        """Makes the process group."""
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ.get("RANK_INTERFACE", "lo")
        if self.rank:
            self._store = distributed.TCPStore(
                *addresses[0], self.size, is_master=False, wait_for_workers=False
            )
        distributed.init_process_group(
            "gloo", store=self._store, rank=self.rank, world_size=self.size
        )

    def array(self, nbytes):
        """Returns a tensor."""
        return torch.ones(nbytes // 4)

    def reduce(self, array):
        """Adds in place."""
        distributed.all_reduce(array)


if __name__ == "__main__":
    reductions.main(Gloo)
