"""The proof that nothing is left can fail: each kind of leftover is seen and named."""

import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import launchpad_lite as lp
from launchpad_lite.testing import poll_until, take_inventory


def test_nothing_new_is_nothing_left():
    assert not take_inventory().leftovers()


def test_a_thread_is_seen_with_its_stack():
    before, end = take_inventory(), threading.Event()
    thread = threading.Thread(target=end.wait, name="forgotten")
    thread.start()
    try:
        # It may still be on its way to where it waits.
        poll_until(lambda: "in wait" in str(before.leftovers()))
        left = before.leftovers()
    finally:
        end.set()
        thread.join()
    assert "forgotten" in left.threads


def test_a_process_is_seen():
    before = take_inventory()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        left = before.leftovers()
        process.kill()
    assert set(left.processes) == {process.pid}


def test_a_listening_port_is_seen():
    before = take_inventory()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert before.leftovers().ports == {port}
        assert f"port {port}" in str(before.leftovers())


def test_an_open_file_and_a_temporary_folder_are_seen(tmp_path, monkeypatch):
    # In a folder of its own: others test on this machine, too.
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = take_inventory()
    with (
        (tmp_path / "open").open("w"),
        tempfile.TemporaryDirectory(prefix="launchpad_lite") as folder,
    ):
        assert before.leftovers().files == {str(tmp_path / "open"), folder}
    assert not before.leftovers()
    assert not Path(folder).exists()


def test_the_folder_of_logs_is_none(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = take_inventory()
    program = lp.Program("logs")
    program.add_node(lp.PyNode(print, "hello"), label="node")
    lp.launch(program, "test_mp").wait()
    assert list(tmp_path.iterdir())
    poll_until(lambda: not before.leftovers().files)
