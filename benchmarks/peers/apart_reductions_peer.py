"""The carrier of this project, told that each replica has a machine of its own."""

import courier_peer
import harness
import plain_reductions_peer
import reductions

import courier
from launchpad_lite.replicas._courier_carrier import CourierCarrier
from launchpad_lite.replicas._mailbox import Box, Mailbox

_PROTECTION = courier_peer.protection(harness.Setup("", "00" * 32, tls=reductions.TLS))


class Apart(plain_reductions_peer.Plain):
    """One replica."""

    def address(self):
        """Returns where its mailbox is."""
        self._box = Box()
        self._calls = 0
        self._server = courier.Server(Mailbox(self._box), host=reductions.HOST, **_PROTECTION)
        self._server.start()
        return self._server.address

    def join(self, addresses):
        """Makes the carrier."""
        peers = [courier.Client(address, **_PROTECTION) for address in addresses]
        machines = [str(rank) for rank in range(self.size)]
        self.carrier = CourierCarrier(self.rank, self._box, peers, machines)


if __name__ == "__main__":
    reductions.main(Apart)
