"""Inference engines that serve HTTP, as generators."""

import http.client
import json
import logging
import shutil
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import courier
import launchpad_lite as lp
from courier import lowlevel
from launchpad_lite.parts.private_files import make_own_folder
from launchpad_lite.rollouts._patience import Lateness
from launchpad_lite.rollouts.errors import InferenceError

#: Seconds that a connection may take, and until an engine that is not there is tried again.
_CONNECT_S, _RETRY_S = 5.0, 0.5
#: Characters of what an engine answers, in errors.
_MOST_TEXT = 1000

_LOGGER = logging.getLogger(__name__)

#: The requests of each kind of engines: to hold all others, and to go on with them.
_PAUSES = {"vllm": ("/pause?mode=wait", {}), "sglang": ("/pause_generation", {"mode": "retract"})}
_RESUMES = {"vllm": "/resume", "sglang": "/continue_generation"}


class HttpEngine:
    """A generator whose rollouts come from an inference engine that serves HTTP: vLLM or SGLang.

    The engine is a node of its own, such as an `lp.CommandNode`, or runs elsewhere. It has one
    generator, with many `threads`. New weights go to it by a folder, before rollouts begin that are
    to be made with them; what runs then is finished with those before. If the engine is lost, its
    rollouts are made again, once it is back and has the newest weights again.

    Derive a class for other rollouts than one completion. Thread-safe.

    Example:
        class Player(rollouts.HttpEngine):
            def generate(self, prompt, weights, environment):
                (answer,) = self.complete(prompt, max_tokens=512)
                return answer["text"], environment.step(answer["text"])
    """

    #: A connection that breaks when the engine is lost, and its weights with it.
    _watch: socket.socket | None = None

    def __init__(
        self,
        address: str | Sequence[str],
        *,
        write: Callable[[Any, Path], object],
        folder: str | Path,
        kind: str = "vllm",
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        **options: Any,
    ) -> None:
        """Makes the generator of an engine; connects with its first request.

        Args:
            address: `host:port` of the engine; with several generators, of that of each, in order.
            write: Writes published parameters into an empty folder as files that the engine loads, such
                as `model.safetensors`.
            folder: Where these folders are made, on this host; the engine finds them under the same
                path. The one of the newest weights stays when the program ends.
            kind: "vllm" or "sglang".
            headers: Of all requests, such as `{"Authorization": "Bearer ..."}`.
            timeout_s: Seconds that an engine may be silent during a request; None: without limit.
            **options: Of all completions, such as `max_tokens` or `model`.

        Raises:
            ValueError: The kind is unknown, or there are fewer addresses than generators.
        """
        if kind not in _RESUMES:
            raise ValueError(f"HttpEngine: kind is 'vllm' or 'sglang', not {kind!r}")
        node = lp.current_node()
        addresses = [address] if isinstance(address, str) else address
        if node.replica >= len(addresses):
            raise ValueError(
                f"{node.name} has no engine: each generator needs one, and there are {len(addresses)}"
            )
        self._where = addresses[node.replica]
        self._address = lowlevel.split_address(self._where)
        self._kind, self._write, self._options = kind, write, options
        self._headers = {"Content-Type": "application/json", **(headers or {})}
        self._timeout_s = timeout_s
        # Engines look for files by patterns, in which brackets mean something.
        self._folder = Path(folder).absolute() / f"{node.label}-{node.replica}"
        shutil.rmtree(self._folder, ignore_errors=True)
        #: The folders of the weights that it has to have, and has.
        self._newest: Path | None = None
        self._loaded: Path | None = None
        self._lock = threading.Lock()

    def generate(self, prompt: Any, weights: Any, *more: Any) -> Any:  # noqa: ARG002
        """Returns the first answer to a prompt: a dict with its `text`, as `complete` returns it."""
        return self.complete(prompt)[0]

    def complete(self, prompt: Any, **options: Any) -> list[dict[str, Any]]:
        """Returns the `choices` for a prompt, of the OpenAI protocol (`POST /v1/completions`).

        Args:
            prompt: A text, or a list of tokens.
            **options: As those of the constructor, for this request.

        Raises:
            InferenceError: The engine refuses the request.
            CourierError: The engine is lost, or this node is to stop.
        """
        watch = self._prepare()
        body = {"prompt": prompt, **self._options, **options}
        choices: list[dict[str, Any]] = self._post("/v1/completions", body)["choices"]
        if not _is_open(watch):
            raise courier.ServerLostError(f"the engine at {self._where} has started again")
        return choices

    def update_weights(self, params: Any, version: int) -> None:
        """Has the engine load new weights. Generators call it once for each version.

        Raises:
            InferenceError: The engine refuses them.
            CourierError: As `complete`.
        """
        folder = self._folder / str(version)
        shutil.rmtree(folder, ignore_errors=True)
        self._write(params, make_own_folder(folder))
        with self._lock:
            before, self._newest, self._loaded = self._newest, folder, None
        if before is not None and before != folder:
            shutil.rmtree(before, ignore_errors=True)
        self._prepare()

    def pause(self) -> None:
        """Has the engine hold all requests."""
        self._post(*_PAUSES[self._kind])

    def resume(self) -> None:
        """Has the engine go on with them."""
        self._post(_RESUMES[self._kind], {})

    def _prepare(self) -> socket.socket:
        """Returns a connection to the engine, which has the newest weights; waits until it is there."""
        with self._lock:
            if self._watch is None or not _is_open(self._watch):
                self._watch, self._loaded = self._connected(), None
            if self._loaded != self._newest:
                self._load(str(self._newest))
                self._loaded = self._newest
            return self._watch

    def _load(self, folder: str) -> None:
        if self._kind == "sglang":  # it waits for the requests that run
            self._post("/update_weights_from_disk", {"model_path": folder})
            return
        self.pause()
        what = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
        self._post("/collective_rpc", what)
        self.resume()  # not after an error: its weights may be torn

    def __del__(self) -> None:
        if self._watch is not None:
            self._watch.close()

    def _connected(self) -> socket.socket:
        lateness = Lateness(_LOGGER)
        while not lp.wait_for_stop(0):
            try:
                connection = socket.create_connection(self._address, _CONNECT_S)
                connection.setblocking(False)
                return connection
            except OSError as error:
                lateness.warn(f"the engine at {self._where} does not answer: {error}")
                lp.wait_for_stop(_RETRY_S)
        raise courier.CallCancelledError(f"{self._where}: this node was asked to stop")

    def _post(self, path: str, body: Mapping[str, Any]) -> Any:
        what = f"the engine at {self._where}: POST {path}"
        connection = http.client.HTTPConnection(*self._address, timeout=self._timeout_s)
        try:
            connection.request("POST", path, json.dumps(body), self._headers)
            answer = connection.getresponse()
            text = answer.read().decode(errors="replace")
        except (OSError, http.client.HTTPException) as error:
            raise courier.ServerLostError(f"{what}: {error!r}") from error
        finally:
            connection.close()
        if answer.status != http.HTTPStatus.OK:
            raise InferenceError(f"{what}: {answer.status}: {lowlevel.shortened(text, _MOST_TEXT)}")
        return json.loads(text or "null")


def _is_open(connection: socket.socket) -> bool:
    try:
        connection.recv(1)
    except BlockingIOError:
        return True
    except OSError:
        pass
    connection.close()
    return False
