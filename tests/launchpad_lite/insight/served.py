"""Two nodes of which there is something to see."""

from typing import Any

import launchpad_lite as lp


class Server:
    def get(self) -> int:
        return 1


class Caller:
    def __init__(self, server: Any) -> None:
        self._server = server

    def run(self) -> None:
        lp.log({"loss": 0.5}, step=self._server.get())
        print("first\nsecond \x1b[31mred\x1b[0m", flush=True)
        lp.wait_for_stop()
