"""Copies bytes between two sockets: between our port and gRPC, which cannot take a connection."""

import contextlib
import socket
import threading
import time

_PIECE_BYTES = 1 << 16
#: Each pair costs two threads; more have to wait for another time.
_MAX_PAIRS = 128
#: Seconds for what is on its way when all ends; somebody may not take it.
_LAST_S = 2.0


class Pump:
    """Two threads per pair of sockets, one for each direction. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._threads: set[threading.Thread] = set()
        self._stopped = False

    def connect(self, first: socket.socket, second: socket.socket) -> None:
        """Copies from each to the other until both have ended; then closes them."""
        pair = _Pair(self, first, second)
        with self._lock:
            stopped = self._stopped or len(self._sockets) >= 2 * _MAX_PAIRS
            if not stopped:
                self._sockets |= {first, second}
                for source, target in ((first, second), (second, first)):
                    thread = threading.Thread(
                        target=pair.copy, args=(source, target), name="courier-pump", daemon=True
                    )
                    thread.start()
                    self._threads.add(thread)
        if stopped:
            first.close()
            second.close()

    def finish(self, *sockets: socket.socket) -> None:
        """Closes a pair that has ended."""
        with self._lock:
            self._sockets -= set(sockets)
            self._threads.discard(threading.current_thread())
        for sock in sockets:
            sock.close()

    def leave(self) -> None:
        """Forgets the calling thread, which has nothing more to copy."""
        with self._lock:
            self._threads.discard(threading.current_thread())

    def stop(self) -> None:
        """Ends all pairs, after what has come from either side."""
        with self._lock:
            self._stopped = True
            sockets, threads = list(self._sockets), list(self._threads)
        give_up_at = time.monotonic() + _LAST_S
        # What has come goes on first: an answer may be the last of it.
        for how in (socket.SHUT_RD, socket.SHUT_RDWR):
            for sock in sockets:
                with contextlib.suppress(OSError):
                    sock.shutdown(how)
            for thread in threads:
                thread.join(max(_LAST_S / 10, give_up_at - time.monotonic()))
            if not any(thread.is_alive() for thread in threads):
                return


class _Pair:
    def __init__(self, pump: Pump, first: socket.socket, second: socket.socket) -> None:
        self._pump = pump
        self._sockets = (first, second)
        self._left = 2
        self._lock = threading.Lock()
        for sock in self._sockets:
            sock.setblocking(True)

    def copy(self, source: socket.socket, target: socket.socket) -> None:
        room = memoryview(bytearray(_PIECE_BYTES))
        try:
            while count := source.recv_into(room):
                target.sendall(room[:count])
            target.shutdown(socket.SHUT_WR)
        except OSError:
            for sock in self._sockets:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
        with self._lock:
            self._left -= 1
            is_last = self._left == 0
        if is_last:
            self._pump.finish(*self._sockets)
        else:
            self._pump.leave()
