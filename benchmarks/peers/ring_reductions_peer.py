"""The floor between hosts: a ring of bare sockets, without frames; with TLS if that is wanted."""

import itertools
import socket
import ssl
import threading

import floor_peer
import harness
import reductions

_CHUNK_BYTES = 1 << 20


class Ring(reductions.Rank):
    """One rank: a thread sends while the other receives and adds."""

    def address(self):
        """Returns where it listens."""
        self._listening = socket.create_server((reductions.HOST, 0))
        return self._listening.getsockname()

    def join(self, addresses):
        """Connects to the next rank, and takes the connection of the one before."""
        accepted = []
        accepting = threading.Thread(target=lambda: accepted.append(self._accept()))
        accepting.start()
        self._next = _connect(addresses[(self.rank + 1) % self.size])
        accepting.join()
        (self._before,) = accepted

    def _accept(self):
        return _wrapped(self._listening.accept()[0], is_server=True)

    def array(self, nbytes):
        """Returns an array, and keeps room for a chunk."""
        import numpy as np

        self._room = np.empty(min(_CHUNK_BYTES, nbytes) // 4, np.float32)
        return super().array(nbytes)

    def reduce(self, array):
        """Adds in place: each part goes around once as a sum, and then as the result."""
        edges = [len(array) * index // self.size for index in range(self.size + 1)]
        parts = [array[begin:end] for begin, end in itertools.pairwise(edges)]
        for step in range(2 * self.size - 2):
            sent = parts[(self.rank - step) % self.size]
            sending = threading.Thread(
                target=self._next.sendall, args=(memoryview(sent).cast("B"),)
            )
            sending.start()
            part = parts[(self.rank - step - 1) % self.size]
            if step < self.size - 1:
                for begin in range(0, len(part), len(self._room)):
                    chunk = part[begin : begin + len(self._room)]
                    room = self._room[: len(chunk)]
                    self._receive(room)
                    chunk += room
            else:
                self._receive(part)
            sending.join()

    def _receive(self, room):
        view = memoryview(room).cast("B")
        while view:
            view = view[self._before.recv_into(view) :]


def _connect(address):
    return _wrapped(socket.create_connection(address), is_server=False)


def _wrapped(connected, *, is_server):
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if not reductions.TLS:
        return connected
    purpose = ssl.Purpose.CLIENT_AUTH if is_server else ssl.Purpose.SERVER_AUTH
    context = floor_peer.context_of(harness.Setup("", "", tls=reductions.TLS), purpose)
    return context.wrap_socket(
        connected,
        server_side=is_server,
        server_hostname=None if is_server else connected.getpeername()[0],
    )


if __name__ == "__main__":
    reductions.main(Ring)
