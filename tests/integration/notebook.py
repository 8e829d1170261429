"""Runs cells in a real kernel; in a process of its own, since jupyter_client leaves an event loop.

Reads a JSON list of cells from standard input, each `{"code": ..., "interrupt_at": file or null}`;
prints a JSON list of `[what the cell printed, name of its error or null]`.
"""

import json
import sys
import threading
from pathlib import Path

from jupyter_client.manager import start_new_kernel

from launchpad_lite.testing import poll_until


def main():
    # The kernel named python3 is always that of the running interpreter.
    manager, client = start_new_kernel(kernel_name="python3")
    try:
        results = [run(manager, client, **cell) for cell in json.load(sys.stdin)]
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    print(json.dumps(results))


def run(manager, client, code, interrupt_at):
    printed = []

    def show(message):
        if message["msg_type"] == "stream":
            printed.append(message["content"]["text"])

    def interrupt():
        poll_until(Path(interrupt_at).exists, timeout_s=30)
        manager.interrupt_kernel()

    thread = threading.Thread(target=interrupt)
    if interrupt_at:
        thread.start()
    reply = client.execute_interactive(code, output_hook=show, timeout=60)
    if interrupt_at:
        thread.join()
    return "".join(printed), reply["content"].get("ename")


if __name__ == "__main__":
    main()
