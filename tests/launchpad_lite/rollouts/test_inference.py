"""Inference engines that serve HTTP as generators, with a stand-in for vLLM and SGLang."""

import contextlib
import http.server
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import launchpad_lite as lp
from launchpad_lite import rollouts


class _Engine(http.server.ThreadingHTTPServer):
    """Answers completions with the version of its weights; the first one has that of its files."""

    daemon_threads = True

    def __init__(self, port: int = 0) -> None:
        self.weights = -1
        self.told: list[str] = []
        self.goes_on = threading.Event()
        self.goes_on.set()
        self._connections: list[socket.socket] = []
        super().__init__(("127.0.0.1", port), _Handler)
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server_port}"

    def process_request(self, request: Any, client_address: Any) -> None:
        self._connections.append(request)
        super().process_request(request, client_address)

    def die(self) -> None:
        """Closes all connections, as the kernel does for a process that is killed."""
        self.shutdown()
        self.server_close()
        for each in self._connections:
            with contextlib.suppress(OSError):  # it has ended
                each.shutdown(socket.SHUT_RDWR)

    def load(self, folder: str) -> None:
        self.weights = json.loads(Path(folder, "weights.json").read_text("utf-8"))

    def answer(self, path: str, body: Any) -> tuple[int, Any]:
        self.told.append(path)
        if path == "/v1/completions":
            self.goes_on.wait(20)
            if body["prompt"] == "bad":
                return 400, {"error": "no such prompt"}
            return 200, {"choices": [{"text": f"{self.weights}", "max_tokens": body["max_tokens"]}]}
        if path == "/pause?mode=wait":
            self.goes_on.clear()
        elif path == "/resume":
            self.goes_on.set()
        elif path == "/collective_rpc":
            assert not self.goes_on.is_set()
            assert body["method"] == "reload_weights"
            self.load(body["kwargs"]["weights_path"])
        elif path == "/update_weights_from_disk":
            self.load(body["model_path"])
        else:
            return 404, "not here"
        return 200, {"success": True}


class _Handler(http.server.BaseHTTPRequestHandler):
    server: _Engine

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        status, answer = self.server.answer(self.path, body)
        content = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def engines() -> Iterator[list[_Engine]]:
    started = [_Engine()]
    yield started
    for each in started:
        each.die()


def write(params: int, folder: Path) -> None:
    (folder / "weights.json").write_text(json.dumps(params), "utf-8")


def run(engine: _Engine, prompts: list[str], train: Any, folder: Path, **options: Any) -> None:
    whole = lp.Program("rollouts")
    external = whole.add_node(lp.ExternalNode(engine.address, client=str), label="engine")
    generator = lp.Deferred(
        rollouts.HttpEngine, external, write=write, folder=folder, max_tokens=7, **options
    )
    handle = rollouts.Rollouts(prompts, max_staleness=1).add_to(
        whole, generator=generator, generators=1, threads=3
    )
    whole.add_node(lp.PyNode(train, handle), label="trainer")
    lp.launch(whole, "local_mt").wait()


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_rollouts_come_from_an_engine_with_their_weights_also_after_it_was_lost(
    kind: str, engines: list[_Engine], tmp_path: Path
) -> None:
    steps = []

    def train(made: rollouts.RolloutsClient) -> None:
        made.publish(1)
        for batch in made.batches(groups=2):
            for group in batch:
                (rollout,) = group.rollouts
                assert rollout.value["max_tokens"] == 7
                # At least: one that waited for newer weights says those that it was ordered with.
                assert rollout.version <= int(rollout.value["text"]) <= batch.step + 1
            if batch.step == 4:
                engines[-1].die()
                engines.append(_Engine(engines[-1].server_port))
            steps.append(batch.step)
            made.publish(batch.step + 2)

    run(engines[0], ["a"] * 20, train, tmp_path, kind=kind)
    assert steps == list(range(10))
    others = {"/pause?mode=wait", "/collective_rpc", "/resume"}
    wanted = others if kind == "vllm" else {"/update_weights_from_disk"}
    for engine in engines:
        assert set(engine.told) == {"/v1/completions", *wanted}
    assert len(list((tmp_path / "generator-0").iterdir())) == 1  # those before are removed


def test_what_an_engine_refuses_is_told_with_its_answer(
    engines: list[_Engine], tmp_path: Path
) -> None:
    errors: list[str] = []

    def train(made: rollouts.RolloutsClient) -> None:
        made.publish(1)
        for _ in made.batches(groups=1):
            pass
        errors.extend(error for each in made.set_aside for error in each.errors)

    run(engines[0], ["a", "bad"], train, tmp_path)
    where = f"the engine at {engines[0].address}: POST /v1/completions"
    wanted = f'{where}: 400: {{"error": "no such prompt"}}'
    assert errors
    assert all(f"InferenceError: {wanted}" in each for each in errors)


def test_each_generator_needs_an_engine(engines: list[_Engine], tmp_path: Path) -> None:
    def make() -> None:
        rollouts.HttpEngine([engines[0].address], write=write, folder=tmp_path)

    def refuse() -> None:
        with pytest.raises(ValueError, match=r"work\[1\] has no engine: each generator needs one"):
            make()
        with pytest.raises(ValueError, match="kind is 'vllm' or 'sglang', not 'tgi'"):
            rollouts.HttpEngine("127.0.0.1:1", write=write, folder=tmp_path, kind="tgi")

    whole = lp.Program("engines")
    for function in (make, refuse):
        whole.add_node(lp.PyNode(function), label="work")
    lp.launch(whole, "local_mt").wait()
