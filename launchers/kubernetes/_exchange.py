"""Accepts the connections of pods: the supervisor's end of their links.

One thread carries the bytes of all links. The rest of the supervisor sees each link as a `PodLine`,
which behaves like the `ssh` process that reaches a host.
"""

import asyncio
import contextlib
import logging
import os
import socket
import subprocess
import threading
from collections.abc import Callable
from typing import IO, Any

from courier import TlsCredentials
from courier.lowlevel import bound
from launchers.host.pod import part, receive, send
from launchers.kubernetes._timing import DEFAULT, Timing
from launchers.supervision.console import warn

#: Exit code of `ssh`, and of a line, when the connection fails.
_LINK_BROKE = 255
_BACKLOG = 1024

_LOGGER = logging.getLogger(__name__)


class PodLine:
    """The link to a pod that may come later. Implements `launchers.host.link.Reach`.

    Data that is written before the pod has called waits for it. The link ends with the connection.
    """

    def __init__(self, exchange: "PodExchange", host: str) -> None:
        """Called by `PodExchange.expect`."""
        self.host = host
        self._exchange = exchange
        self._ended = threading.Event()
        # Sockets, because the kernel shrinks the buffers of a user with many pipes, and the first data
        # waits here for the pod.
        self.source, written = socket.socketpair()
        self.stdin: IO[bytes] = os.fdopen(written.detach(), "wb", buffering=0)
        self.sink, read = socket.socketpair()
        self.stdout: IO[bytes] = os.fdopen(read.detach(), "rb", buffering=0)
        read_fd, self._reason_fd = os.pipe()
        self.stderr: IO[bytes] = os.fdopen(read_fd, "rb")

    def wait(self, timeout: float | None = None) -> int:
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired(self.host, timeout or 0.0)
        return _LINK_BROKE

    def terminate(self) -> None:
        self._exchange.drop(self)

    kill = terminate

    def end(self, reason: str = "") -> None:
        """Ends the line, and notes why; the exchange calls it once."""
        # Written before the end is visible, because readers look for the reason then.
        with contextlib.suppress(BrokenPipeError):
            os.write(self._reason_fd, reason.encode())
        os.close(self._reason_fd)
        self.source.close()
        self.sink.close()
        self._ended.set()


class PodExchange:
    """Accepts connections of pods, and joins each with the line that waits for it. Thread-safe.

    A pod belongs to the run if it has a certificate of the run's authority. If another pod calls
    under the host name of one that is connected, the earlier one is gone: its line ends.
    """

    def __init__(self, tls: TlsCredentials, port: int, timing: Timing = DEFAULT) -> None:
        """Begins to listen on all interfaces; port 0 takes a free one."""
        self._timing = timing
        self._context = tls.server_context()
        self._listener = bound("::", port, socket.SO_REUSEADDR, backlog=_BACKLOG)
        self.port = int(self._listener.getsockname()[1])
        self._lock = threading.Lock()
        #: Whether pods can call; false once it was closed or has failed.
        self.is_open = True
        # Of the thread alone:
        self._loop = asyncio.new_event_loop()
        self._closing = asyncio.Event()
        #: By host name: done, with a line that waits for its pod; or not done, if a pod waits for its line.
        self._expected: dict[str, asyncio.Future[PodLine]] = {}
        #: The task of the newest pod of each host name, and the task that carries each line.
        self._served: dict[str, asyncio.Task[None] | None] = {}
        self._carried: dict[PodLine, asyncio.Task[None] | None] = {}
        self._thread = threading.Thread(target=self._serve, name="launchpad-exchange", daemon=True)
        self._thread.start()

    def expect(self, host: str) -> PodLine:
        """Returns the link to the pod of this host name, whether it has called already or not."""
        line = PodLine(self, host)
        if not self._ask(self._expect, line):
            line.end()
        return line

    def give_up(self, host: str) -> None:
        """Ends all lines of a host name, also those that wait for a pod."""
        self._ask(self._end_lines, lambda line: line.host == host)

    def drop(self, line: PodLine) -> None:
        """Ends a line, and the connection behind it. May be repeated."""
        self._ask(self._end_lines, lambda each: each is line)

    @property
    def awaited(self) -> tuple[str, ...]:
        """Host names of the pods that lines wait for."""
        expected = [*self._expected.items()]
        return tuple(sorted(host for host, line in expected if line.done()))

    def close(self) -> None:
        """Ends all lines. May be repeated."""
        self._ask(self._closing.set)
        self._thread.join()

    def _ask(self, do: Callable[..., object], *of: object) -> bool:
        """Has the thread call a function; returns whether the thread will do so."""
        with self._lock:
            if self.is_open:
                self._loop.call_soon_threadsafe(do, *of)
            return self.is_open

    # Its thread

    def _serve(self) -> None:
        try:
            self._loop.run_until_complete(self._listen())
        except Exception as error:  # noqa: BLE001 - it is reported
            # All lines end, so that the program ends as well and does not wait for ever.
            warn(_LOGGER, "the exchange failed", error=error)
        with self._lock:
            self.is_open = False
        self._loop.run_until_complete(self._end())
        self._loop.close()

    async def _listen(self) -> None:
        server = await asyncio.start_server(
            self._answer,
            sock=self._listener,
            ssl=self._context,
            ssl_handshake_timeout=self._timing.greeting_s,
            backlog=_BACKLOG,
        )
        await self._closing.wait()
        server.close()

    async def _end(self) -> None:
        """Ends all tasks and lines, after the calls that were passed to the thread before."""
        await asyncio.sleep(0)
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for each in tasks:
            each.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._end_lines(lambda _: True)

    def _expect(self, line: PodLine) -> None:
        future = self._expected.get(line.host)
        if future is not None and future.done():
            # One line for each host: a new line means that the earlier one was given up.
            future.result().end()
            future = None
        if future is None:
            future = self._expected[line.host] = self._loop.create_future()
        future.set_result(line)

    def _end_lines(self, is_meant: Callable[[PodLine], bool]) -> None:
        for line, task in list(self._carried.items()):
            if is_meant(line) and task is not None:
                task.cancel()
        for host, future in list(self._expected.items()):
            if future.done() and is_meant(future.result()):
                del self._expected[host]
                future.result().end()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            host = await asyncio.wait_for(_read_greeting(reader), self._timing.greeting_s)
            line = await self._await_line(host, reader)
            if line is not None:
                await self._carry(line, reader, writer)
        except (OSError, ValueError, EOFError, asyncio.TimeoutError) as error:
            _LOGGER.debug("a caller is refused, or has gone: %s", error)
        finally:
            writer.transport.abort()

    async def _await_line(self, host: str, reader: asyncio.StreamReader) -> PodLine | None:
        """Returns the line of a pod once there is one; None if the pod has gone."""
        if (before := self._served.get(host)) is not None:
            before.cancel()
        self._served[host] = asyncio.current_task()
        future = self._expected.setdefault(host, self._loop.create_future())
        if not future.done():
            # The pod sends nothing now, so a finished read means that it has gone.
            gone = asyncio.ensure_future(reader.read(1))
            either: list[asyncio.Future[Any]] = [future, gone]
            try:
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            finally:
                gone.cancel()
            if gone.done():
                return None
        if self._expected.get(host) is not future:
            return None  # the line was given up in the meantime
        del self._expected[host]
        return future.result()

    async def _carry(
        self, line: PodLine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._carried[line] = asyncio.current_task()
        carrying: list[asyncio.Future[None]] = []
        ends: list[asyncio.StreamWriter] = []
        reason = ""
        try:
            source, unused = await asyncio.open_connection(sock=line.source)
            ends.append(unused)
            _, sink = await asyncio.open_connection(sock=line.sink)
            ends.append(sink)
            carrying += map(asyncio.ensure_future, (send(source, writer), receive(reader, sink)))
            sending, receiving = carrying
            await asyncio.wait(carrying, return_when=asyncio.FIRST_COMPLETED)
            if receiving.done():  # the last data of the pod must still be read
                error = receiving.exception()
                reason = str(error or "its agent has ended; the log of its pod may say why")
                if isinstance(error, EOFError):
                    reason = "its pod has closed the connection"
                sink.close()
                await asyncio.wait_for(sink.wait_closed(), self._timing.part_s)
            else:  # the supervisor reads no more, but the pod must get the end
                reason = str(sending.exception() or "")
                receiving.cancel()
                await asyncio.wait({receiving})
                await asyncio.wait_for(part(reader), self._timing.part_s)
        finally:
            for task in carrying:
                task.cancel()
            for end in ends:
                with contextlib.suppress(AttributeError):  # it is closed (Python 3.11)
                    end.transport.abort()
            try:
                # The streams are closed only after this. It may be cancelled as well, when all ends.
                await asyncio.gather(*carrying, asyncio.sleep(0), return_exceptions=True)
            finally:
                del self._carried[line]
                if self._served[line.host] is not asyncio.current_task():
                    reason = "another pod has called in its place"
                line.end(reason)


async def _read_greeting(reader: asyncio.StreamReader) -> str:
    """Returns the host name of a pod, which is that of the pod it replaces, too."""
    host, line_end, _ = (await reader.readline()).decode().partition("\n")
    if not host or not line_end:
        raise ValueError("a pod that does not say who it is")
    return host
