"""Two machines, as far as the network goes: network namespaces with a cable between them."""

import os
import shutil
import subprocess

SERVER_IP, CLIENT_IP = "10.213.77.1", "10.213.77.2"


def _ip(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *words], capture_output=True, text=True, timeout=20)


def _must(*words: str) -> None:
    done = _ip(*words)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"


def why_not() -> str:
    """Returns why there can be none here; empty where there can."""
    if shutil.which("ip") is None:
        return "needs iproute2"
    if os.geteuid() != 0:
        return "needs root to make network namespaces"
    probe = f"lp{os.getpid()}p"
    made = _ip("netns", "add", probe)
    if made.returncode != 0:
        return f"cannot make network namespaces here: {made.stderr.strip()}"
    _ip("netns", "del", probe)
    return ""


class Machines:
    """Two machines, as far as the network goes, and the cable between them."""

    def __init__(self) -> None:
        self.server, self.client = f"lp{os.getpid()}s", f"lp{os.getpid()}c"
        #: What runs a command on one of them.
        self.on_server = ("ip", "netns", "exec", self.server)
        self.on_client = ("ip", "netns", "exec", self.client)
        self._cable = (f"lps{os.getpid()}", f"lpc{os.getpid()}")

    def make(self) -> None:
        ends = self._cable
        for space in (self.server, self.client):
            _must("netns", "add", space)
        _must("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for space, end, address in (
            (self.server, ends[0], SERVER_IP),
            (self.client, ends[1], CLIENT_IP),
        ):
            _must("link", "set", end, "netns", space)
            _must("-n", space, "addr", "add", f"{address}/24", "dev", end)
            _must("-n", space, "link", "set", end, "up")
            _must("-n", space, "link", "set", "lo", "up")

    def plug(self, state: str) -> None:
        """Pulls the cable ("down"), or puts it back ("up"), at both ends."""
        for space, end in zip((self.server, self.client), self._cable, strict=True):
            _must("-n", space, "link", "set", end, state)

    def close(self) -> None:
        for space in (self.server, self.client):
            _ip("netns", "del", space)
        _ip("link", "del", self._cable[0])
