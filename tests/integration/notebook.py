"""Runs cells in a real kernel; in a process of its own, since jupyter_client leaves an event loop.

Reads a JSON list of cells from standard input, each `{"code": ..., "interrupt_at": file or null}`, or of
keys that are pressed, each `{"key": "complete" (Tab) or "inspect" (Shift-Tab), "text": ...}`;
prints a JSON list of `[what the cell printed, name of its error or null]`, and last a list of what was
displayed or renewed in any cell, `[type of the message, its id, its content by type]`.
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
    displays = []
    receive = client.iopub_channel.get_msg

    def receive_all(*args, **kwargs):
        message = receive(*args, **kwargs)
        if message["msg_type"] in ("display_data", "update_display_data"):
            content = message["content"]
            displays.append(
                [message["msg_type"], content["transient"].get("display_id"), content["data"]]
            )
        return message

    client.iopub_channel.get_msg = receive_all
    try:
        results = [
            press(client, **cell) if "key" in cell else run(manager, client, **cell)
            for cell in json.load(sys.stdin)
        ]
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    print(json.dumps([*results, displays]))


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


def press(client, key, text):
    getattr(client, key)(text, len(text))
    told = client.get_shell_msg(timeout=60)["content"]
    return " ".join(told["matches"]) if key == "complete" else told["data"]["text/plain"], None


if __name__ == "__main__":
    main()
