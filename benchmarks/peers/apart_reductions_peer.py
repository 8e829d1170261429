"""The carrier of this project, told that each replica has a machine of its own."""

import plain_reductions_peer
import reductions

import courier
from launchpad_lite.replicas._courier_carrier import CourierCarrier


class Apart(plain_reductions_peer.Plain):
    """One replica."""

    def join(self, addresses):
        """Makes the carrier."""
        peers = [courier.Client(address) for address in addresses]
        machines = [str(rank) for rank in range(self.size)]
        self.carrier = CourierCarrier(self.rank, self._box, peers, machines)


if __name__ == "__main__":
    reductions.main(Apart)
