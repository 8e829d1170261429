"""The parameter server of this project, as its documentation shows it."""

import updates

import launchpad_lite as lp
from launchpad_lite import engines


class Values(engines.ParameterServer):
    """One value."""

    barrier = engines.ASP()

    def __init__(self, size: int) -> None:
        self._size = size

    def start(self) -> None:
        """Makes an update."""
        self._update = updates.value(self._size)

    def initial(self):
        """Returns the value."""
        return {"value": updates.value(self._size)}

    def push(self, worker, values):  # noqa: ARG002 - the engine's
        """Returns an update."""
        updates.touch(values["value"])
        return {"value": self._update}


class ParameterServer(updates.Engine):
    """Nodes as processes."""

    def start(self, workers: int, size: int) -> None:
        """Launches them."""
        program = lp.Program("values")
        ps = Values(size).add_to(program, workers=workers, progress_s=None)
        self._running = lp.launch(program, "local_mp")
        self._client = ps.dereference()

    def updates(self) -> int:
        """Asks the server."""
        return self._client.progress().updates

    def stop(self) -> None:
        """Stops the program."""
        self._running.stop()


if __name__ == "__main__":
    updates.main(ParameterServer())
