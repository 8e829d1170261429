"""Programs of one machine run where there is only one kind of address, and listen on loopback alone."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.beds.addresses import with_only, without_ipv6
from tests.engines import needs_root

_CHECKOUT = Path(__file__).resolve().parents[2]
_PROGRAM = f"""
import sys
sys.path.insert(0, {str(_CHECKOUT)!r})
import courier, psutil
import launchpad_lite as lp
from courier import lowlevel
from tests.courier.grpc_client import GrpcClient


class Adder:
    def add(self, one, other):
        return one + other


def check(address, secret):
    assert courier.Client(address, secret=secret).add(1, 2) == 3
    assert GrpcClient(address, secret).call("add", 1, 2) == 3
    assert courier.is_healthy(address, timeout_s=20)


class Asker:
    def __init__(self, adder):
        self.adder = adder

    def run(self):
        secret, _ = lowlevel.credentials(self.adder)
        check(self.adder.address, secret)
        listening = [each.laddr.ip for each in psutil.net_connections("tcp") if each.status == "LISTEN"]
        print("host", lowlevel.split_address(self.adder.address)[0], "listening", *{{*listening}})
        with courier.Server(Adder(), host="::", secret=secret) as server:
            check(lowlevel.join_address(lowlevel.loopback(), server.port), secret)
        with courier.Server(Adder()) as server:
            assert courier.Client(server.address).add(1, 2) == 3
        lp.stop()


if __name__ == "__main__":
    program = lp.Program("addresses")
    adder = program.add_node(lp.CourierNode(Adder), label="adder")
    program.add_node(lp.CourierNode(Asker, adder), label="asker")
    lp.launch(program, launch_type=sys.argv[1], log_dir=sys.argv[2]).wait()
"""


def _output(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(_PROGRAM)
    return path


@needs_root
@pytest.mark.slow
@pytest.mark.parametrize("launch_type", ["local_mp", "local_mt"])
@pytest.mark.parametrize(("family", "loopback"), [("ipv6", "::1"), ("ipv4", "127.0.0.1")])
def test_where_there_is_one_kind_of_address_nodes_listen_on_its_loopback_and_nowhere_else(
    family: str, loopback: str, launch_type: str, script: Path
) -> None:
    command = [sys.executable, str(script), launch_type, str(script.parent / "logs")]
    assert f"host {loopback} listening {loopback}\n" in _output(with_only(family, command))


@pytest.mark.skipif(sys.platform != "linux", reason="filters system calls")
def test_a_kernel_without_ipv6_is_enough(script: Path) -> None:
    command = [sys.executable, str(script), "local_mt", str(script.parent / "logs")]
    assert "host 127.0.0.1 listening" in _output(without_ipv6(command))


_ZONE = f"""
import socket, sys
sys.path.insert(0, {str(_CHECKOUT)!r})
import courier

known = socket.getaddrinfo
socket.getaddrinfo = lambda host, *rest, **more: known(
    b"fe80::1%lo" if host == b"card.example" else host, *rest, **more
)
secret = courier.Secret.generate()
with courier.Server(lambda: 1, host="fe80::1%lo", secret=secret) as server:
    for host in ("[fe80::1%lo]", "card.example"):
        print(courier.with_timeout(courier.Client(f"{{host}}:{{server.port}}", secret=secret), 5)())
"""


@needs_root
def test_a_name_may_stand_for_an_address_of_one_network_card() -> None:
    enter = 'ip link set lo up && ip address add fe80::1/64 dev lo nodad && exec "$@"'
    command = ["unshare", "--net", "/bin/sh", "-c", enter, "-", sys.executable, "-c", _ZONE]
    assert _output(command) == "1\n1\n"
