"""The carrier of this project; arrays lie in its buffers, as those of its replicas do."""

import reductions

import courier
from launchpad_lite.replicas._carrier import CollectiveCall
from launchpad_lite.replicas._courier_carrier import CourierCarrier
from launchpad_lite.replicas._mailbox import Box, Mailbox


class Carrier(reductions.Rank):
    """One replica."""

    def address(self):
        """Returns where its mailbox is."""
        self._box = Box()
        self._server = courier.Server(Mailbox(self._box))
        self._server.start()
        self._calls = 0
        self._buffer = None
        return self._server.address

    def join(self, addresses):
        """Makes the carrier."""
        peers = [courier.Client(address) for address in addresses]
        self.carrier = CourierCarrier(self.rank, self._box, peers, ["here"] * self.size)

    def array(self, nbytes):
        """Returns a part of a buffer of the carrier."""
        if self._buffer is None or len(self._buffer) < nbytes:
            self._buffer = self.carrier.buffer(nbytes)
        return self._buffer[:nbytes].view("float32")

    def reduce(self, array):
        """Adds in place."""
        self._calls += 1
        self.carrier.all_reduce(array, "sum", CollectiveCall(self._calls, "all_reduce(sum)"))


if __name__ == "__main__":
    reductions.main(Carrier)
