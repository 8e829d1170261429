"""Nodes start processes with what the script defines, wherever plain Python can."""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.launchers.scripts import Script

SCRIPT = """
import multiprocessing, pickle, sys
import launchpad_lite as lp

print("imported as", __name__)

class Item:
    def __init__(self, number):
        self.number = number

def square(item):
    return Item(item.number**2)

def put(queue, item):
    queue.put(square(item))

class Loader:
    def run(self):
        context = multiprocessing.get_context(sys.argv[1])
        with context.Pool(1) as pool:
            items = pool.map(square, [Item(2), Item(3)])
        queue = context.SimpleQueue()
        child = context.Process(target=put, args=(queue, Item(4)))
        child.start()
        items.append(queue.get())
        child.join()
        items.append(pickle.loads(pickle.dumps(Item(5))))
        print("numbers", [item.number for item in items], all(type(i) is Item for i in items))

if __name__ == "__main__":
    program = lp.Program("loading")
    program.add_node(lp.PyClassNode(Loader), label="loader")
    lp.launch(program, "local_mp").wait()
"""

ONE_CHILD = """
import multiprocessing, sys

def double(number):
    print("the child doubles", 2 * number)

class Loader:
    def run(self):
        context = multiprocessing.get_context(sys.argv[1])
        child = context.Process(target=double, args=(21,))
        child.start()
        child.join()
        print("exit code", child.exitcode)
"""

LAUNCHES = """
import launchpad_lite as lp
program = lp.Program("loading")
program.add_node(lp.PyClassNode(Loader), label="loader")
lp.launch(program, "local_mp").wait()
"""


@pytest.mark.parametrize(
    ("method", "command", "children"),
    [
        ("fork", (), [0]),
        ("spawn", (), [2]),
        pytest.param("spawn", (sys.executable, "-m", "script"), [2], marks=pytest.mark.slow),
        pytest.param("forkserver", (), [1, 2], marks=pytest.mark.slow),
    ],
)
def test_pools_and_processes_of_a_node_take_what_the_script_defines(
    tmp_path: Path, method: str, command: tuple[str, ...], children: list[int]
) -> None:
    with Script(tmp_path, SCRIPT) as script:
        # The server that forks listens at a path there, which must not be long.
        ended = script.run(method, command=command, env={"TMPDIR": tempfile.gettempdir()})
    assert ended.code == 0, ended.stderr
    assert "[loader[0]] numbers [4, 9, 16, 5] True" in ended.stdout
    # The node itself does not run the script, nor does a child that is forked. Servers that fork
    # import it themselves in some versions of Python.
    assert ended.stdout.count("imported as __main__") == 1
    assert ended.stdout.count("imported as __mp_main__") in children


def test_a_script_without_a_guard_is_not_launched_again_by_a_child(tmp_path: Path) -> None:
    with Script(tmp_path, ONE_CHILD + LAUNCHES) as script:
        ended = script.run("spawn")
    assert ended.code == 0, ended.stderr
    assert "[loader[0]] exit code 1" in ended.stdout
    cause = (
        r"LaunchError: \S+/script.py:\d+: the script is imported by a process that multiprocessing"
    )
    assert re.search(cause, ended.stdout)
    assert 'if __name__ == "__main__":' in ended.stdout


LAUNCHED_BY_A_CHILD = """
    import multiprocessing, sys
    import launchpad_lite as lp

    class Number:
        def __init__(self, value):
            self.value = value

    def square(value):
        return value * value

    class Server:
        def square(self, number):
            with multiprocessing.get_context("fork").Pool(1) as pool:
                return Number(*pool.map(square, [number.value]))

    def call(server):
        squared = server.square(Number(3))
        print(squared.value, type(squared) is Number)

    def launch():
        program = lp.Program("child")
        server = program.add_node(lp.CourierNode(Server), label="server")
        program.add_node(lp.PyNode(call, server), label="caller")
        lp.launch(program, "local_mp").wait()

    if __name__ == "__main__":
        child = multiprocessing.get_context(sys.argv[1]).Process(target=launch)
        child.start()
        child.join()
        sys.exit(child.exitcode)
"""


@pytest.mark.parametrize("method", ["spawn", pytest.param("forkserver", marks=pytest.mark.slow)])
def test_a_child_launches_what_the_script_defines(tmp_path: Path, method: str) -> None:
    with Script(tmp_path, LAUNCHED_BY_A_CHILD) as script:
        ended = script.run(method, env={"TMPDIR": tempfile.gettempdir()})
    assert ended.code == 0, ended.stderr
    assert "[caller[0]] 9 True" in ended.stdout


ENDS_AS_USUAL = """
    import multiprocessing, signal, sys
    import launchpad_lite as lp

    def child():
        sys.exit(signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL)

    def fork():
        process = multiprocessing.get_context("fork").Process(target=child)
        process.start()
        process.join()
        print("exit code", process.exitcode)

    if __name__ == "__main__":
        program = lp.Program("forks")
        program.add_node(lp.PyNode(fork), label="node")
        lp.launch(program, "local_mp").wait()
"""


def test_sigterm_ends_a_forked_child_at_once_whatever_it_waits_for(tmp_path: Path) -> None:
    with Script(tmp_path, ENDS_AS_USUAL) as script:
        ended = script.run(env={"TMPDIR": tempfile.gettempdir()})
    assert "[node[0]] exit code 0" in ended.stdout, ended.stderr


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_what_has_no_file_gets_what_plain_python_gives_it(tmp_path: Path, method: str) -> None:
    """As in a notebook."""
    plain, node = (
        subprocess.run(
            [sys.executable, "-c", ONE_CHILD + rest, method],
            capture_output=True,
            text=True,
            timeout=60,
            cwd=tmp_path,
            env={**os.environ, "LAUNCHPAD_LOGGING_DIR": str(tmp_path / "logs")},
        )
        for rest in ("Loader().run()", LAUNCHES)
    )
    pattern = "the child doubles 42|exit code [01]|AttributeError: .*"
    happened = [sorted(re.findall(pattern, ended.stdout + ended.stderr)) for ended in (plain, node)]
    assert len(happened[0]) == 2
    assert happened[0] == happened[1]


# Instead of a launch: what another host would have, whose files are others.
SENT = """
import shutil, sys
from multiprocessing.spawn import get_preparation_data
from pathlib import Path
import launchpad_lite as lp
from launchers.hosts.shipping import pack_up
from launchpad_lite.process.script import Script

class Loader:
    def run(self): ...

if __name__ == "__main__":
    program = lp.Program("loading")
    program.add_node(lp.PyClassNode(Loader), label="loader")
    tree, _ = pack_up(lp.plan(program, "test_mp").executables).trees
    path = Path("sent")
    path.mkdir()
    for name, file in tree.files.items():
        shutil.copy(file, path / name)
    script = Script.here()
    Path(__file__).write_text("raise SystemExit('an older script')")
    sys.path.insert(0, str(path.absolute()))
    script.stand_in()
    data = get_preparation_data("child")
    print("children import", data.get("init_main_from_path") or data["init_main_from_name"])
"""


@pytest.mark.parametrize(
    ("command", "imported"), [((), "sent/script.py"), ((sys.executable, "-m", "script"), "script")]
)
def test_children_on_other_hosts_import_the_script_that_was_sent(
    tmp_path: Path, command: tuple[str, ...], imported: str
) -> None:
    with Script(tmp_path, SENT) as script:
        ended = script.run(command=command)
    assert ended.code == 0, ended.stderr
    assert re.search(rf"children import .*{imported}$", ended.stdout.strip())
