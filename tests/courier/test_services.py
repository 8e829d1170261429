"""Methods of an object answer gRPC services of their own, for clients that hold the secret."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

import courier
from tests.courier.conftest import Serve
from tests.courier.grpc_client import GrpcClient, refused

Code = grpc.StatusCode
ADD = "/sums.v1.Sums/Add"
FAIL = "/sums.v1.Sums/Fail"
WAIT = "/sums.v1.Sums/Wait"


class Sums:
    def __init__(self) -> None:
        self.total = 0
        self.entered = threading.Event()
        self.cancelled = threading.Event()

    @courier.grpc_service("sums.v1.Sums", "Add", "Fail", "Wait")
    async def answer(self, method: str, request: bytes) -> bytes:
        if method == "Fail":
            raise KeyError(request.decode())
        if method == "Wait":
            self.entered.set()
            try:
                await asyncio.sleep(30)
            except asyncio.CancelledError:
                self.cancelled.set()
                raise
        self.total += int(request)
        return str(self.total).encode()

    @courier.grpc_service("sums.v1.Blocking", "Add", "Text", "Items")
    def answer_here(self, method: str, request: bytes) -> Any:
        return {"Add": request * 2, "Text": "text", "Items": self.items()}[method]

    def items(self) -> Iterator[int]:
        yield 1


@pytest.fixture
def sums() -> Sums:
    return Sums()


@pytest.fixture
def client(sums: Sums, serve: Serve, secret: courier.Secret) -> "Iterator[GrpcClient]":
    server, _ = serve(sums)
    with contextlib.closing(GrpcClient(server.address, secret)) as client:
        yield client


def test_a_service_is_answered_beside_the_methods(client: GrpcClient) -> None:
    assert client.ask(ADD, b"2") == b"2"
    assert client.ask(ADD, b"3") == b"5"
    assert client.ask("/sums.v1.Blocking/Add", b"3") == b"33"
    assert client.call("answer", "Add", b"4") == b"9"  # in the same session


_NO_BYTES = "answered by answer_here, which has not returned bytes"


@pytest.mark.parametrize(
    ("path", "code", "text"),
    [
        (FAIL, Code.UNKNOWN, "KeyError: 'so'"),
        ("/sums.v1.Blocking/Text", Code.UNKNOWN, _NO_BYTES),
        ("/sums.v1.Blocking/Items", Code.UNKNOWN, _NO_BYTES),
        ("/sums.v1.Sums/Other", Code.UNIMPLEMENTED, ""),
    ],
)
def test_what_cannot_be_answered_is_a_status(
    client: GrpcClient, path: str, code: grpc.StatusCode, text: str
) -> None:
    with refused(code, text=text):
        client.ask(path, b"so")


def test_a_call_whose_client_leaves_is_cancelled(client: GrpcClient, sums: Sums) -> None:
    with refused(Code.DEADLINE_EXCEEDED):
        client.ask(WAIT, b"1", timeout=0.3)
    assert sums.entered.is_set()
    assert sums.cancelled.wait(20)


# Strangers.


def test_a_stranger_is_not_answered(client: GrpcClient, sums: Sums) -> None:
    seal = client.metadata(ADD, b"1", 7)["courier_seal_bin"]
    for wrong in (
        {"courier_seal_bin": b"\0" * 32},
        {"courier_session_bin": b"\0" * 16},
        {"courier_sequence": "8", "courier_seal_bin": seal},
    ):
        with refused(Code.UNAUTHENTICATED):
            client.ask(ADD, b"1", **wrong)
    with refused(Code.UNAUTHENTICATED, text="say hello first"):
        client.plain(ADD, b"1")
    for number in ("", "-1", "one", "1" * 20):
        with refused(Code.INVALID_ARGUMENT, text="courier-sequence is a number"):
            client.ask(ADD, b"1", courier_sequence=number)
    assert sums.total == 0


def test_who_does_not_hold_the_secret_is_not_answered(sums: Sums, serve: Serve) -> None:
    server, _ = serve(sums)
    stranger = GrpcClient(server.address, courier.Secret.generate())
    with contextlib.closing(stranger), refused(Code.UNAUTHENTICATED, text="wrong seal"):
        stranger.ask(ADD, b"1")
    assert sums.total == 0


def test_a_seal_is_good_for_one_request_to_one_method(client: GrpcClient, sums: Sums) -> None:
    metadata = client.metadata(ADD, b"1", 7)
    assert client.plain(ADD, b"1", **metadata) == b"1"
    with refused(Code.UNAUTHENTICATED, text="already received"):
        client.plain(ADD, b"1", **metadata)
    metadata = client.metadata(ADD, b"1", 8)
    for path, request in ((ADD, b"2"), ("/sums.v1.Blocking/Add", b"1")):
        with refused(Code.UNAUTHENTICATED, text="wrong seal"):
            client.plain(path, request, **metadata)
    assert sums.total == 1


# On the server.


def test_methods_may_be_bound_and_unbound_while_it_serves(
    serve: Serve, secret: courier.Secret
) -> None:
    server, _ = serve(None)
    client = GrpcClient(server.address, secret)

    @courier.grpc_service("late.v1.Late", "Say")
    def say(method: str, request: bytes) -> bytes:
        return method.encode() + request

    server.bind("say", say)
    assert client.ask("/late.v1.Late/Say", b"!") == b"Say!"
    server.bind("say", lambda: None)
    with refused(Code.UNIMPLEMENTED):
        client.ask("/late.v1.Late/Say", b"!")
    server.bind("say", say)
    server.unbind("say")
    with refused(Code.UNIMPLEMENTED):
        client.ask("/late.v1.Late/Say", b"!")
    client.close()


@pytest.mark.parametrize("names", [("", "A"), ("s",), ("s/t", "A"), ("s", "A/B")])
def test_a_service_and_its_methods_have_names(names: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="not names of a gRPC service"):
        courier.grpc_service(*names)
