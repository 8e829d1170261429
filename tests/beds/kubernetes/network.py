"""The cluster's network: an address per pod, DNS names, Services and NetworkPolicies.

Each pod has a network namespace, all hang on one that routes between them; there its rules are
enforced, and the DNS server listens. They live by descriptors of this process and end with it.
"""

import contextlib
import ctypes
import ipaddress
import os
import select
import socket
import struct
import subprocess
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from tests.beds.kubernetes.selectors import selects
from tests.beds.kubernetes.store import Object, Store
from tests.beds.ssh_hosts import find_program

DOMAIN = "cluster.local"
ServiceNetwork = ipaddress.IPv4Network | ipaddress.IPv6Network
SERVICES: ServiceNetwork = ipaddress.ip_network("10.96.0.0/16")
_CLONE_NEWNET = 0x40000000
_TTL_S = 1
_A, _AAAA = 1, 28
_NO_ERROR, _NO_NAME = 0, 3

T = TypeVar("T")


@dataclass(frozen=True)
class Wire:
    """A pod's connection."""

    uid: str
    address: str
    link: str
    """The name of its end at the router."""
    namespace: int
    """The descriptor that keeps the pod's network namespace."""

    @property
    def path(self) -> str:
        return f"/proc/{os.getpid()}/fd/{self.namespace}"


class PodNetwork:
    """Connects pods; thread-safe.

    Args:
        store: The pods, services and policies that rules and names follow.
        ipv6: Whether there is IPv6 alone, also on loopback.

    Attributes:
        services: Addresses of services; the tenth is the DNS server's.
        dns: Its address.
        loopback: Of pods.
    """

    def __init__(self, store: Store, *, ipv6: bool = False) -> None:
        self.services = ipaddress.ip_network("fd00:96::/112") if ipv6 else SERVICES
        self.dns = str(self.services[10])
        self.loopback = "::1" if ipv6 else "127.0.0.1"
        self._is_ipv6 = ipv6
        self._family = socket.AF_INET6 if ipv6 else socket.AF_INET
        self._gateway = "fe80::1" if ipv6 else "169.254.1.1"
        self._host = "128 nodad" if ipv6 else "32"
        self._store = store
        self._lock = threading.Lock()
        self._count = 0
        self._wires: dict[str, Wire] = {}
        self._cut: set[str] = set()
        self._rules = ""
        self._router = _new_network()
        self._relays: list[socket.socket] = []
        self._ip(
            self._router,
            [
                "link set lo up",
                f"address add {self.dns}/{self._host} dev lo",
                f"route add {self.services} dev lo",
            ],
        )
        setting = "ipv6/conf/all/forwarding" if ipv6 else "ipv4/ip_forward"
        forward = ["/bin/sh", "-c", f"echo 1 >/proc/sys/net/{setting}"]
        _call([*self._inside(self._router), *forward])
        self._dns = self._within(lambda: socket.socket(self._family, socket.SOCK_DGRAM))
        self._dns.bind((self.dns, 53))
        self._end, self._closing = os.pipe()
        self._thread = threading.Thread(target=self._serve, name="cluster dns", daemon=True)
        self._thread.start()

    def close(self) -> None:
        os.close(self._closing)
        self._thread.join()
        os.close(self._end)
        self._dns.close()
        for relay in self._relays:
            with contextlib.suppress(OSError):
                relay.shutdown(socket.SHUT_RDWR)
            relay.close()
        for wire in [*self._wires.values()]:
            self.remove(wire)
        os.close(self._router)

    def wires(self) -> list[Wire]:
        with self._lock:
            return [*self._wires.values()]

    def add(self, uid: str) -> Wire:
        """Gives a pod an address."""
        with self._lock:
            self._count += 1
            number = self._count
        high, low = divmod(number, 250)
        address = f"fd00:244::{high}:{low + 2}" if self._is_ipv6 else f"10.244.{high}.{low + 2}"
        wire = Wire(uid, address, f"pod{number}", _new_network())
        # An address of its own for the router on each link: it answers for it, and pods route all
        # to it, so that every packet passes the rules.
        self._ip(
            self._router,
            [
                f"link add {wire.link} type veth peer name eth0 netns {wire.path}",
                f"link set {wire.link} addrgenmode none",
                f"address add {self._gateway}/{self._host} dev {wire.link}",
                f"link set {wire.link} up",
                f"route add {wire.address} dev {wire.link}",
            ],
        )
        self._ip(
            wire.namespace,
            [
                "link set lo up",
                "link set eth0 addrgenmode none",
                f"address add {wire.address}/{self._host} dev eth0",
                "link set eth0 up",
                f"route add {self._gateway} dev eth0{'' if self._is_ipv6 else ' scope link'}",
                f"route add default via {self._gateway} dev eth0",
                *(["address del 127.0.0.1/8 dev lo"] if self._is_ipv6 else []),
            ],
        )
        with self._lock:
            self._wires[uid] = wire
        return wire

    def remove(self, wire: Wire) -> None:
        with self._lock:
            if self._wires.pop(wire.uid, None) is None:
                return
            self._cut.discard(wire.uid)
        with contextlib.suppress(RuntimeError):  # it went with its peer
            self._ip(self._router, [f"link delete {wire.link}"])
        os.close(wire.namespace)

    def cut(self, uid: str) -> None:
        """Drops all packets from and to a pod; nobody is told."""
        with self._lock:
            self._cut.add(uid)
        self.sync()

    def heal(self, uid: str | None = None) -> None:
        with self._lock:
            self._cut -= {uid} if uid else {*self._cut}
        self.sync()

    def publish(self, port: int) -> str:
        """Lets pods reach a port of this machine's loopback; returns the address for them."""
        listener = self._within(lambda: socket.create_server((self.dns, port), family=self._family))
        self._relays.append(listener)
        threading.Thread(target=_relay, args=(listener, port), daemon=True).start()
        return f"[{self.dns}]:{port}" if self._is_ipv6 else f"{self.dns}:{port}"

    def sync(self) -> None:
        """Makes the rules those of the objects as they are now."""
        with self._lock:
            rules = "\n".join([*self._filter_rules(), *self._service_rules()]) + "\n"
            if rules == self._rules:
                return
            restore = "ip6tables-restore" if self._is_ipv6 else "iptables-restore"
            restore = find_program(restore) or restore
            _call([*self._inside(self._router), restore, "--wait"], rules)
            self._rules = rules

    def _filter_rules(self) -> Iterator[str]:
        yield from ("*filter", ":INPUT ACCEPT", ":FORWARD ACCEPT", ":OUTPUT ACCEPT")
        for wire in self._wires.values():
            if wire.uid in self._cut:
                for chain, side in (("FORWARD", "s"), ("FORWARD", "d"), ("INPUT", "s")):
                    yield f"-A {chain} -{side} {wire.address} -j DROP"
        yield "-A FORWARD -m conntrack --ctstate ESTABLISHED,RELATED -j ACCEPT"
        yield f"-A FORWARD -d {self.services} -j REJECT"
        pods = [pod for pod in self._store.items("pods") if pod["metadata"]["uid"] in self._wires]
        policies = self._store.items("networkpolicies")
        for pod in pods:
            closed = [
                policy["spec"]
                for policy in policies
                if "Ingress" in (policy["spec"].get("policyTypes") or ["Ingress"])
                and policy["metadata"]["namespace"] == pod["metadata"]["namespace"]
                and selects(policy["spec"]["podSelector"], _labels(pod))
            ]
            if not closed:
                continue
            address = self._wires[pod["metadata"]["uid"]].address
            for policy in closed:
                for rule in policy.get("ingress") or []:
                    yield from self._ingress(address, rule, pods)
            yield f"-A FORWARD -d {address} -j DROP"
        yield "COMMIT"

    def _ingress(
        self, address: str, rule: Mapping[str, Any], pods: Sequence[Object]
    ) -> Iterator[str]:
        sources = [""]
        if peers := rule.get("from"):
            sources = [
                f"-s {self._wires[pod['metadata']['uid']].address} "
                for pod in pods
                for peer in peers
                if "podSelector" in peer and selects(peer["podSelector"], _labels(pod))
            ]
        for source in sources:
            yield f"-A FORWARD {source}-d {address} -j ACCEPT"

    def _service_rules(self) -> Iterator[str]:
        yield from ("*nat", ":PREROUTING ACCEPT", ":POSTROUTING ACCEPT", ":OUTPUT ACCEPT")
        for service in self._store.items("services"):
            spec, pods = service["spec"], self._endpoints(service)
            if spec["clusterIP"] == "None" or not pods:
                continue
            # That of a supervisor: one pod is there, or a new one beside one that ends.
            address = self._wires[pods[-1]["metadata"]["uid"]].address
            address = f"[{address}]" if self._is_ipv6 else address
            for port in spec["ports"]:
                yield (
                    f"-A PREROUTING -d {spec['clusterIP']} -p tcp --dport {port['port']} "
                    f"-j DNAT --to-destination {address}:{port['targetPort']}"
                )
        yield "COMMIT"

    def _endpoints(self, service: Object) -> list[Object]:
        """The pods behind a service."""
        spec, found = service["spec"], []
        if not spec.get("selector"):
            return []
        for pod in self._store.items("pods", service["metadata"]["namespace"]):
            status = pod.get("status", {})
            if pod["metadata"]["uid"] not in self._wires:
                continue
            if status.get("phase") in ("Succeeded", "Failed"):
                continue
            if not selects({"matchLabels": spec["selector"]}, _labels(pod)):
                continue
            ready = any(
                one["type"] == "Ready" and one["status"] == "True"
                for one in status.get("conditions", [])
            )
            ready = ready and "deletionTimestamp" not in pod["metadata"]
            if ready or spec.get("publishNotReadyAddresses"):
                found.append(pod)
        return found

    def resolve(self, name: str) -> list[str] | None:
        """The addresses of a full name; None where it does not exist."""
        suffix = f".svc.{DOMAIN}"
        name = name.rstrip(".").lower()
        if not name.endswith(suffix):
            return None
        *host, title, namespace = ["", *name.removesuffix(suffix).split(".")][-3:]
        service = self._store.find("services", namespace, title)
        if service is None:
            return None
        hostname = host[0] if host else ""
        if service["spec"]["clusterIP"] != "None":
            return None if hostname else [service["spec"]["clusterIP"]]
        with self._lock:
            pods = [
                pod
                for pod in self._endpoints(service)
                if not hostname
                or (pod["spec"].get("hostname"), pod["spec"].get("subdomain")) == (hostname, title)
            ]
            return [self._wires[pod["metadata"]["uid"]].address for pod in pods] or None

    def _serve(self) -> None:
        while True:
            ready, _, _ = select.select([self._dns.fileno(), self._end], [], [])
            if self._end in ready:
                return
            with contextlib.suppress(OSError, ValueError, struct.error, IndexError):
                query, client = self._dns.recvfrom(4096)
                self._dns.sendto(_answer(query, self.resolve), client)

    def _within(self, make: Callable[[], T]) -> T:
        """What a function makes inside the router's namespace."""
        return _elsewhere(lambda libc: libc.setns(self._router, _CLONE_NEWNET), make)

    def _inside(self, namespace: int) -> list[str]:
        # Not `ip netns exec`, which hides /sys/fs/cgroup.
        return ["/usr/bin/nsenter", f"--net=/proc/{os.getpid()}/fd/{namespace}"]

    def _ip(self, namespace: int, lines: Iterable[str]) -> None:
        program = find_program("ip") or "ip"
        _call([*self._inside(namespace), program, "-batch", "-"], "\n".join(lines) + "\n")


def _labels(pod: Object) -> Mapping[str, str]:
    labels: Mapping[str, str] = pod["metadata"].get("labels") or {}
    return labels


def _answer(query: bytes, resolve: Callable[[str], list[str] | None]) -> bytes:
    """A DNS answer, in the words of RFC 1035."""
    parts, at = [], 12
    while query[at]:
        parts.append(query[at + 1 : at + 1 + query[at]].decode("latin-1"))
        at += 1 + query[at]
    (kind,) = struct.unpack_from("!H", query, at + 1)
    question = query[12 : at + 5]
    addresses = resolve(".".join(parts))
    records = []
    for address in addresses or []:
        if kind == (_AAAA if ":" in address else _A):
            number = ipaddress.ip_address(address).packed
            records.append(struct.pack("!HHHIH", 0xC00C, kind, 1, _TTL_S, len(number)) + number)
    code = _NO_NAME if addresses is None else _NO_ERROR
    flags = 0x8580 | code
    head = query[:2] + struct.pack("!HHHHH", flags, 1, len(records), 0, 0)
    return head + question + b"".join(records)


def _relay(listener: socket.socket, port: int) -> None:
    def pump(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def serve(client: socket.socket) -> None:
        with (
            contextlib.suppress(OSError),
            client,
            socket.create_connection(("127.0.0.1", port), 30) as server,
        ):
            server.settimeout(None)  # an answer may take its time
            back = threading.Thread(target=pump, args=(server, client), daemon=True)
            back.start()
            pump(client, server)
            back.join()

    while True:
        try:
            client, _ = listener.accept()
        except OSError:
            return
        threading.Thread(target=serve, args=(client,), daemon=True).start()


def _new_network() -> int:
    """A descriptor of a new network namespace."""

    def open_own() -> int:
        return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)

    return _elsewhere(lambda libc: libc.unshare(_CLONE_NEWNET), open_own)


def _elsewhere(enter: Callable[[ctypes.CDLL], int], make: Callable[[], T]) -> T:
    """What a function makes in another namespace: those are a thread's, so it runs in one."""
    libc = ctypes.CDLL(None, use_errno=True)
    made: list[T] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            if enter(libc):
                raise OSError(ctypes.get_errno(), "cannot enter a network namespace")
            made.append(make())
        except Exception as error:  # noqa: BLE001 - the caller gets it
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return made[0]


def _call(command: Sequence[str], text: str | None = None) -> str:
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=30)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr}\n{text or ''}")
    return done.stdout
