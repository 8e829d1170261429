"""The first process of a node's pod: connects to the supervisor, and links an agent to it.

Its text is mounted into the pod, which may lack our packages, so it uses only the standard library.
"""

import asyncio
import contextlib
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
from pathlib import Path

#: Exit code of a pod whose link broke, or that was asked to end: another one may replace it.
MAY_COME_BACK = 75
#: Exit code of a pod that is not needed any more.
_FOR_GOOD = 1
#: Most bytes of a piece on the link, and the bytes of its size, which comes before it.
_PIECE_BYTES = 1 << 16
_SIZE_BYTES = 4
#: Seconds for one attempt to connect, and the pauses between two.
_CONNECT_S = 10.0
_PAUSES_S = (0.1, 0.2, 0.5, 1.0, 2.0)
#: Seconds that the agent has, once its link is gone, to end all; its own limits are shorter.
_END_S = 15.0
#: Seconds that the supervisor has to read the last messages.
_PART_S = 5.0
#: Runs the loader. Asked to end before it is the agent, it has nothing to report of its node.
_AGENT = f"""\
import sys
try:
    exec(sys.argv.pop())
except SystemExit as end:
    if isinstance(end.code, str):
        sys.stderr.write(end.code + chr(10))
except BaseException:
    sys.excepthook(*sys.exc_info())
sys.exit({MAY_COME_BACK})
"""


async def send(source: asyncio.StreamReader, link: asyncio.StreamWriter) -> None:
    """Sends what comes from a source, in pieces, and then an empty piece that marks the end.

    TLS cannot close one direction alone, and to close a connection that has unread data discards
    what is on its way. So each end sends a mark of its end, and the other closes.
    """
    while piece := await source.read(_PIECE_BYTES):
        link.write(len(piece).to_bytes(_SIZE_BYTES, "big") + piece)
        await link.drain()
    link.write(bytes(_SIZE_BYTES))
    await link.drain()


async def receive(
    link: asyncio.StreamReader, sink: asyncio.StreamWriter, *, goes_on: bool = False
) -> None:
    """Forwards what is received until its end; `goes_on` even if the sink takes no more."""
    while size := int.from_bytes(await link.readexactly(_SIZE_BYTES), "big"):
        piece = await link.readexactly(size)
        if goes_on and sink.is_closing():
            continue
        sink.write(piece)
        try:
            await sink.drain()
        except OSError:
            if not goes_on:
                raise


async def part(link: asyncio.StreamReader) -> None:
    """Discards what still comes, until the other end closes the link."""
    while await link.read(_PIECE_BYTES):
        pass


def main(loader: str) -> None:
    """Runs in the pod, and then ends the process. `loader` reads its program from its input."""
    signal.signal(signal.SIGTERM, lambda *_: os._exit(MAY_COME_BACK))
    sys.exit(asyncio.run(_serve(loader)))


async def _serve(loader: str) -> int:
    """Links an agent to the supervisor until either ends; returns the exit code of the pod."""
    context = _context(Path(__file__).parent)
    give_up_at = time.monotonic() + float(os.environ["LAUNCHPAD_WAIT_S"])
    from_supervisor, to_supervisor = await _dial(
        os.environ["LAUNCHPAD_SUPERVISOR"], context, give_up_at
    )
    # A pod that shares the network of its machine has the host name of the machine.
    host = os.environ.get("LAUNCHPAD_HOST") or socket.gethostname()
    try:
        to_supervisor.write(host.encode() + b"\n")
        await to_supervisor.drain()
        agent = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", _AGENT, loader), stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
    except OSError as error:  # the supervisor has just gone, or the machine has no room
        sys.stderr.write(f"launchpad: the pod cannot begin its work: {error}\n")
        return MAY_COME_BACK

    def pass_on(*_: object) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has ended
            agent.terminate()

    # The agent passes it on to its nodes, as a notice.
    signal.signal(signal.SIGTERM, pass_on)
    assert agent.stdin is not None
    assert agent.stdout is not None
    sending = asyncio.ensure_future(send(agent.stdout, to_supervisor))
    # The agent may have ended while its last messages are still on their way.
    receiving = asyncio.ensure_future(receive(from_supervisor, agent.stdin, goes_on=True))
    both = (sending, receiving)
    await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
    if not receiving.done():  # the supervisor reads the rest, and ends its side
        await asyncio.wait({receiving}, timeout=_PART_S)
    # The agent ends everything when its input ends.
    agent.stdin.close()
    try:
        code = await asyncio.wait_for(agent.wait(), _END_S)
    except asyncio.TimeoutError:
        agent.kill()
        code = MAY_COME_BACK
    for each in both:
        each.cancel()
    await asyncio.gather(*both, return_exceptions=True)
    to_supervisor.transport.abort()
    return code if code >= 0 else 128 - code


def _context(folder: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # The authority is the run's own, so each owner of its certificates belongs to the run.
    context.check_hostname = False
    context.load_verify_locations(str(folder / "authority.pem"))
    context.load_cert_chain(str(folder / "certificate.pem"), str(folder / "key.pem"))
    return context


async def _dial(
    address: str, context: ssl.SSLContext, give_up_at: float
) -> "tuple[asyncio.StreamReader, asyncio.StreamWriter]":
    """Connects as soon as the supervisor is there."""
    host, _, port = address.rpartition(":")
    pauses = list(_PAUSES_S)
    while True:
        try:
            dialling = asyncio.open_connection(host, int(port), ssl=context, server_hostname=host)
            reader, writer = await asyncio.wait_for(dialling, _CONNECT_S)
        except (OSError, asyncio.TimeoutError) as error:
            if time.monotonic() > give_up_at:
                sys.stderr.write(f"launchpad: the supervisor, {address}, is not there: {error}\n")
                sys.exit(_FOR_GOOD)
            await asyncio.sleep(pauses.pop(0) if len(pauses) > 1 else pauses[0])
        else:
            # The supervisor sends nothing until all pods have come. Without keepalive, a pod would wait
            # forever for a supervisor whose machine is lost meanwhile.
            plain = writer.get_extra_info("socket")
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 20)
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
            return reader, writer
