"""A worker that knows nothing but gRPC and `search.proto`, and can have a fault.

It takes tasks of the kind "words": texts "SECONDS TEXT"; the result is TEXT in capitals.

    python -m tests.launchpad_lite.search.grpc_worker [FAULT] FOLDER/join.json
"""

import contextlib
import json
import os
import signal
import sys
import threading
import time
import uuid
from pathlib import Path
from typing import Any

import grpc

import courier
from launchpad_lite.search._proto import search_pb2 as pb
from tests.courier.grpc_client import GrpcClient

_GIVES_UP_S = 30.0


class _Server:
    """A server that may be started again: says hello again when it has to."""

    def __init__(self, address: str, secret: courier.Secret) -> None:
        self._address, self._secret = address, secret
        self._client: GrpcClient | None = None

    def ask(self, path: str, request: Any, reply: Any, wait_s: float = 0.0) -> Any:
        try:
            if self._client is None:
                self._client = GrpcClient(self._address, self._secret)
                if not self._client.is_trusted:
                    sys.exit("error: the server does not prove the secret")
            found = self._client.ask(f"/search.v1.{path}", request.SerializeToString(), wait_s + 10)
        except grpc.RpcError:
            self._client = None
            raise
        return reply.FromString(found)


class _Worker:
    def __init__(self, path: Path) -> None:
        info = json.loads(path.read_text())
        self._secret = courier.Secret(bytes.fromhex(info["secret"]))
        self._names = _Server(info["address"], self._secret)
        self._me = pb.Worker(name=f"words-{os.getpid()}", life=uuid.uuid4().hex)
        self._broker: tuple[str, _Server] | None = None
        self._task: Any = None
        self._outcomes: list[Any] = []
        self._stop = threading.Event()
        self.is_over = False

    def run(self) -> None:
        reply = self._register()
        threading.Thread(target=self._beat, args=(reply.beat_s,), daemon=True).start()
        heard_at = time.monotonic()
        while not self.is_over:
            try:
                self._work(min(reply.poll_s, 0.5))
                heard_at = time.monotonic()
            except grpc.RpcError:
                if time.monotonic() - heard_at > _GIVES_UP_S:
                    raise
                self._broker = None
                time.sleep(0.1)
        if _FAULT != "vanishes":
            request = pb.LeaveRequest(worker=self._me, outcomes=self._outcomes)
            with contextlib.suppress(grpc.RpcError):
                if self._broker is not None:
                    self._broker[1].ask("Broker/Leave", request, pb.LeaveReply)
            self._names.ask("NameServer/Leave", pb.LeaveRequest(worker=self._me), pb.LeaveReply)

    def _register(self) -> Any:
        return self._names.ask(
            "NameServer/Register", pb.RegisterRequest(worker=self._me), pb.RegisterReply
        )

    def _work(self, wait_s: float) -> None:
        if self._broker is None:
            place = self._names.ask(
                "NameServer/Place", pb.PlaceRequest(worker=self._me), pb.PlaceReply
            )
            self._broker = place.broker, _Server(place.address, self._secret)
        request = pb.WorkRequest(
            worker=self._me, outcomes=self._outcomes, kinds=["words"], count=1, wait_s=wait_s
        )
        reply = self._broker[1].ask("Broker/Work", request, pb.WorkReply, wait_s)
        self._outcomes = []
        self.is_over |= reply.is_over
        for self._task in reply.assignments:
            self._outcomes.append(self._outcome_of(self._task))
        self._task = None

    def _outcome_of(self, task: Any) -> Any:
        self._stop.clear()
        token = "another" if _FAULT == "token" and len(task.payload) < 100 else task.token
        outcome = pb.Outcome(id=task.id, token=token, state=pb.Outcome.DONE)
        try:
            seconds, text = task.payload.decode().split(" ")
            if self._stop.wait(float(seconds)):
                outcome.state = pb.Outcome.STOPPED
            outcome.payload = text.upper().encode()
        except ValueError as error:
            outcome.state, outcome.text = pb.Outcome.FAILED, str(error)
        return outcome

    def _beat(self, beat_s: float) -> None:
        while True:
            time.sleep(beat_s)
            with contextlib.suppress(grpc.RpcError):
                if self._broker is not None:
                    held = [
                        pb.Held(id=each.id, token=each.token)
                        for each in (self._task, *self._outcomes)
                        if each is not None
                    ]
                    request = pb.BeatRequest(worker=self._me, held=held)
                    stops = self._broker[1].ask("Broker/Beat", request, pb.BeatReply).stops
                    if self._task is not None and self._task.id in stops and _FAULT != "stops":
                        self._stop.set()
                request = pb.PresenceRequest(worker=self._me)
                reply = self._names.ask("NameServer/Beat", request, pb.PresenceReply)
                self.is_over |= reply.is_over
                if not reply.is_known:
                    self._register()


if __name__ == "__main__":
    _FAULT = sys.argv[1] if len(sys.argv) > 2 else ""
    _worker = _Worker(Path(sys.argv[-1]))
    signal.signal(signal.SIGTERM, lambda *_: setattr(_worker, "is_over", True))
    _worker.run()
    os._exit(0)  # the thread of heartbeats may be in a call
