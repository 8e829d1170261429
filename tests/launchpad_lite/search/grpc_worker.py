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


class GrpcMember:
    """Asks the servers of a search, also those that were started again."""

    def __init__(self, path: Path, name: str) -> None:
        info = json.loads(path.read_text())
        self._secret = courier.Secret(bytes.fromhex(info["secret"]))
        self._clients: dict[str, GrpcClient] = {}
        self.names = info["address"]
        self.me = pb.Worker(name=name, life=uuid.uuid4().hex)

    def ask(self, address: str, path: str, request: Any, timeout_s: float = 30.0) -> Any:
        """Calls a method, as `Broker/Work`."""
        try:
            if address not in self._clients:
                self._clients[address] = GrpcClient(address, self._secret)
                if not self._clients[address].is_trusted:
                    sys.exit("error: the server does not prove the secret")
            client = self._clients[address]
            reply = client.ask(f"/search.v1.{path}", request.SerializeToString(), timeout_s)
        except grpc.RpcError:
            self._clients.pop(address, None)
            raise
        kind = type(request).__name__.replace("Request", "Reply")
        return getattr(pb, kind).FromString(reply)

    def close(self) -> None:
        for each in self._clients.values():
            each.close()


class _Worker(GrpcMember):
    def __init__(self, path: Path) -> None:
        super().__init__(path, f"words-{os.getpid()}")
        self._broker = ""
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
                self._broker = ""
                time.sleep(0.1)
        if _FAULT != "vanishes":
            request = pb.LeaveRequest(worker=self.me, outcomes=self._outcomes)
            with contextlib.suppress(grpc.RpcError):
                if self._broker:
                    self.ask(self._broker, "Broker/Leave", request)
            self.ask(self.names, "NameServer/Leave", pb.LeaveRequest(worker=self.me))

    def _register(self) -> Any:
        return self.ask(self.names, "NameServer/Register", pb.RegisterRequest(worker=self.me))

    def _work(self, wait_s: float) -> None:
        if not self._broker:
            request = pb.PlaceRequest(worker=self.me)
            self._broker = self.ask(self.names, "NameServer/Place", request).address
        request = pb.WorkRequest(
            worker=self.me, outcomes=self._outcomes, kinds=["words"], count=1, wait_s=wait_s
        )
        reply = self.ask(self._broker, "Broker/Work", request, wait_s + 10)
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
                if self._broker:
                    held = [
                        pb.Held(id=each.id, token=each.token)
                        for each in (self._task, *self._outcomes)
                        if each is not None
                    ]
                    request = pb.BeatRequest(worker=self.me, held=held)
                    stops = self.ask(self._broker, "Broker/Beat", request, 10).stops
                    if self._task is not None and self._task.id in stops and _FAULT != "stops":
                        self._stop.set()
                request = pb.PresenceRequest(worker=self.me)
                reply = self.ask(self.names, "NameServer/Beat", request, 10)
                self.is_over |= reply.is_over
                if not reply.is_known:
                    self._register()


if __name__ == "__main__":
    _FAULT = sys.argv[1] if len(sys.argv) > 2 else ""
    _worker = _Worker(Path(sys.argv[-1]))
    signal.signal(signal.SIGTERM, lambda *_: setattr(_worker, "is_over", True))
    _worker.run()
    os._exit(0)  # the thread of heartbeats may be in a call
