"""torch.distributed.rpc: each worker calls the server, which answers an update with the value."""

import socket
import threading

import torch
import torch.multiprocessing
import updates
from torch.distributed import rpc

_lock = threading.Lock()
_value = torch.zeros(0)
_updates = 0


def apply(update: torch.Tensor) -> torch.Tensor:
    """Runs on the server: applies an update; returns the value."""
    global _value, _updates
    with _lock:
        _value = _value + update
        _updates += 1
        return _value


def _join(rank: int, workers: int, port: int) -> None:
    options = rpc.TensorPipeRpcBackendOptions(
        num_worker_threads=16, init_method=f"tcp://127.0.0.1:{port}"
    )
    name = f"worker{rank}" if rank else "server"
    rpc.init_rpc(name, rank=rank, world_size=workers + 1, rpc_backend_options=options)


def _work(index: int, workers: int, port: int, size: int) -> None:
    torch.set_num_threads(1)
    _join(index + 1, workers, port)
    update = torch.zeros(size // 4)
    while True:
        value = rpc.rpc_sync("server", apply, (update,))
        updates.touch(value)


class TorchRpc(updates.Engine):
    """This process is the server."""

    def start(self, workers: int, size: int) -> None:
        """Starts the workers."""
        global _value
        _value = torch.zeros(size // 4)
        torch.set_num_threads(1)
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self._workers = torch.multiprocessing.spawn(
            _work, (workers, port, size), workers, join=False
        )
        _join(0, workers, port)

    def updates(self) -> int:
        """Returns how many this process has applied."""
        return _updates

    def stop(self) -> None:
        """Ends the workers."""
        for process in self._workers.processes:
            process.kill()


if __name__ == "__main__":
    updates.main(TorchRpc())
