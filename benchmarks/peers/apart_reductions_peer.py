"""The carrier of this project, told that each replica has a machine of its own."""

import pathlib

import plain_reductions_peer
import reductions

import courier
from launchpad_lite.replicas._courier_carrier import CourierCarrier
from launchpad_lite.replicas._mailbox import Box, Mailbox


class Apart(plain_reductions_peer.Plain):
    """One replica."""

    def address(self):
        """Returns where its mailbox is."""
        self._box = Box()
        self._calls = 0
        self._server = courier.Server(Mailbox(self._box), host=reductions.HOST, **_protection())
        self._server.start()
        return self._server.address

    def join(self, addresses):
        """Makes the carrier."""
        peers = [courier.Client(address, **_protection()) for address in addresses]
        machines = [str(rank) for rank in range(self.size)]
        self.carrier = CourierCarrier(self.rank, self._box, peers, machines)


def _protection():
    protection = {"secret": courier.Secret(b"a secret of 32 bytes for ranks.."[:32])}
    if reductions.TLS:
        pems = {
            name: pathlib.Path(reductions.TLS, f"{name}.pem").read_bytes()
            for name in ("authority", "certificate", "key")
        }
        protection["tls"] = courier.TlsCredentials(**pems)
    return protection


if __name__ == "__main__":
    reductions.main(Apart)
