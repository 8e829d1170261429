"""What users see of programs on several hosts, over real ssh; crashes and cuts are elsewhere."""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
import time
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from launchpad_lite.testing import poll_until
from tests.beds.ssh_hosts import LAUNCHER, SshHosts, lend
from tests.engines import needs_ssh_hosts
from tests.launchers.interpreters import find_other_minor_version, find_python

pytestmark = needs_ssh_hosts

_CHECKOUT = Path(__file__).resolve().parents[2]
#: Containers of this machine may have it as well; it leads nowhere.
_BRIDGE = "172.17.0.1"

_STORE = """
    import json, os, pathlib, socket, sys, time
    import courier
    import launchpad_lite as lp

    class Store:
        def __init__(self):
            self.seen = []

        def add(self, name):
            self.seen.append(name)
            return socket.gethostname()

        def count(self):
            return len(self.seen)

        def echo(self, value):
            return value

    class Worker:
        def __init__(self, store, index, count):
            self.store, self.index, self.count = store, index, count

        def run(self):
            host = self.store.add(self.index)
            print(f"{self.index} on {socket.gethostname()} called {host}", flush=True)
            while self.store.count() < self.count and not lp.wait_for_stop(0.05):
                pass

    def make_program(count=3):
        program = lp.Program("on_hosts")
        with program.group("store"):
            store = program.add_node(lp.CourierNode(Store))
        with program.group("worker"):
            for index in range(count):
                program.add_node(lp.CourierNode(Worker, store, index, count))
        return program

    OPTIONS = json.loads(os.environ.get("LAUNCH_OPTIONS", "{}"))
"""
_LAUNCH = """
    if __name__ == "__main__":
        lp.launch(make_program(), "ssh", **OPTIONS).wait()
"""


class Ended:
    """How a script on h0 ended."""

    def __init__(self, process: "subprocess.Popen[str]", begin: float, timeout_s: float) -> None:
        self.stdout, self.stderr = process.communicate(timeout=timeout_s)
        self.code = process.returncode
        self.seconds = time.monotonic() - begin

    def check(self) -> "Ended":
        """Fails the test with what was printed, unless the script ended well."""
        assert self.code == 0, f"{self.stdout}\n{self.stderr}"
        return self

    @property
    def refusal(self) -> str:
        """What the script failed with: the text of its LaunchError, without a traceback."""
        assert self.code == 1, f"{self.stdout}\n{self.stderr}"
        return self.stderr.partition("errors.LaunchError: ")[2] or self.stderr


class Desk:
    """A user's folder on h0, which no host sees."""

    def __init__(self, hosts: SshHosts, folder: Path) -> None:
        self.hosts = hosts
        self.folder = folder
        self.logs = folder / "logs"

    def write(self, source: str, name: str = "script.py") -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
        return path

    def start(self, command: Sequence[str], **options: Any) -> "subprocess.Popen[str]":
        return self.hosts.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self.folder,
            env={
                **os.environ,
                "LAUNCHPAD_LOGGING_DIR": str(self.logs),
                "LAUNCH_OPTIONS": json.dumps(options),
            },
        )

    def run(self, command: Sequence[str], timeout_s: float = 90.0, **options: Any) -> Ended:
        begin = time.monotonic()
        process = self.start(command, **options)
        try:
            return Ended(process, begin, timeout_s)
        finally:
            process.kill()
            process.communicate()

    def launch(
        self, *source: str, base: str = _STORE, timeout_s: float = 90.0, **options: Any
    ) -> Ended:
        """Runs a script that has what `_STORE` defines, with options for `lp.launch`."""
        script = self.write("".join(map(textwrap.dedent, (base, *(source or [_LAUNCH])))))
        return self.run([sys.executable, str(script)], timeout_s, **options)

    def log(self, node: str) -> str:
        (path,) = self.logs.glob(f"*/{node}.log")
        return path.read_text()


@pytest.fixture
def desk(hosts: SshHosts, tmp_path: Path) -> Desk:
    return Desk(hosts, tmp_path)


def bare_python(hosts: SshHosts) -> str:
    """An interpreter without any packages, on all hosts."""
    folder = hosts.shared / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    return str(folder / "bin" / "python")


@contextlib.contextmanager
def lent(bed: SshHosts) -> Iterator[SshHosts]:
    """A bed of one's own, which must be left as tidy as that of all."""
    with bed, contextlib.contextmanager(lend)(bed):
        yield bed


def trees(hosts: SshHosts, name: str) -> dict[str, int]:
    """The code that a host keeps: when each tree came, by key."""
    found = hosts.run_on(
        name, "sh", "-c", "stat -c '%n %W' ~/.cache/launchpad_lite/trees/* 2>/dev/null || true"
    )
    return {
        Path(path).name: int(at) for path, _, at in (x.rpartition(" ") for x in found.splitlines())
    }


def assert_untouched(hosts: SshHosts) -> None:
    """Nothing runs on any host, and nothing was written there."""
    poll_until(lambda: not hosts.leftovers(), must=False)
    assert not hosts.leftovers()
    assert not [file for name in hosts.names for file in hosts.files(name)]


# Programs


def test_nodes_run_on_their_hosts_and_call_one_another(desk: Desk) -> None:
    ended = desk.launch(hosts="h1,h2,h3").check()
    assert "0 on h2 called h1" in ended.stdout
    assert "1 on h3 called h1" in ended.stdout
    assert "2 on h1 called h1" in ended.stdout


@pytest.mark.parametrize(
    ("example", "last_line"),
    [("consumer_producers", "total: 190"), ("map_reduce", "24/24 files")],
)
@pytest.mark.slow
def test_examples_run_unchanged_from_the_command_line(
    desk: Desk, example: str, last_line: str
) -> None:
    path = _CHECKOUT / "examples" / example / "program.py"
    command = ["-m", "launchpad_lite.launch", "--launcher=ssh", "--hosts=h1,h2,h3", str(path)]
    ended = desk.run([sys.executable, *command]).check()
    assert last_line in ended.stdout
    assert not [line for line in ended.stdout.splitlines() if "Traceback" in line]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("example", "arguments", "last_line"),
    [
        ("consumer_producers", "", "total: 190"),
        ("map_reduce", "num_files=6", "6/6 files"),
        ("actor_learner", "target=60, episodes=5, max_seconds=60", "60 reached"),
    ],
)
def test_examples_run_unchanged_from_a_script(
    desk: Desk, example: str, arguments: str, last_line: str
) -> None:
    source = f"""
        import sys
        sys.path.insert(0, {str(_CHECKOUT)!r})
        from examples.{example}.program import make_program
        import launchpad_lite as lp
        running = lp.launch(make_program({arguments}), "ssh", hosts=["h1", "h2", "h3"])
        hosts = {{node.host for node in running.status()}}
        running.wait()
        assert hosts == {{"h1", "h2", "h3"}}, hosts
        print("all hosts had a part")
    """
    ended = desk.launch(source, base="").check()
    assert "all hosts had a part" in ended.stdout
    assert last_line in ended.stdout


# Batched handlers are not pickled, so their class is in a module.
_SQUARES = """
    import courier

    class Squares:
        @courier.batched_handler(batch_size=8, timeout=0.1)
        def square(self, numbers):
            return numbers * numbers
"""
_TOGETHER = """
    import http.server, threading
    from squares import Squares

    class Shard:
        def __init__(self, index):
            self.index = index

        def where(self):
            return f"{self.index}:{socket.gethostname()}"

    class Counter:
        def __init__(self):
            self.value = 0

        def add(self):
            self.value += 1
            return self.value

        def save(self, folder):
            (pathlib.Path(folder) / "value").write_text(str(self.value))

        def restore(self, folder):
            self.value = int((pathlib.Path(folder) / "value").read_text())

    class Inner:
        def __init__(self, outer):
            self.outer = outer

        def host(self):
            return socket.gethostname()

    class Reader:
        def __init__(self, squares, shards, cached, web, external, inner, counter):
            self.__dict__.update(locals())

        def run(self):
            import urllib.request
            futures = [self.squares.futures.square(number) for number in range(20)]
            assert [each.result() for each in futures] == [n * n for n in range(20)]
            print("shards", *sorted(self.shards.where() for _ in range(3)), flush=True)
            assert self.cached.where() == self.cached.where()
            page = urllib.request.urlopen(f"http://{self.web}/").read()
            assert b"Directory listing" in page
            print("external", urllib.request.urlopen(self.external).read().decode(), flush=True)
            print("inner", self.inner.host(), flush=True)
            print("counter", self.counter.add(), flush=True)
            lp.stop()

    class Outside(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(socket.gethostname().encode())

        def log_message(self, *args):
            pass

    def as_url(address):
        return f"http://{address}/"

    def make_program(address):
        program = lp.Program("together")
        squares = program.add_node(lp.CourierNode(Squares), label="squares")
        with program.group("shard"):
            shards = [program.add_node(lp.CourierNode(Shard, index)) for index in range(3)]
        cached = program.add_node(lp.CacherNode(shards[0], 50, 1000), label="cached")
        counter = program.add_node(lp.CourierNode(Counter), label="counter")
        web = program.add_node(
            lp.CommandNode(
                [sys.executable, "-m", "http.server", "{http.port}"], listens=["http"], cwd="/"
            ),
            label="web",
        )
        external = program.add_node(lp.ExternalNode(address, client=as_url), label="external")
        first, second = lp.CourierNode(Store), None
        handle = first.create_handle()
        second = lp.CourierNode(Inner, handle)
        inner = second.create_handle()
        program.add_node(lp.ColocationNode([first, second]), label="pair")
        program.add_node(
            lp.CourierNode(
                Reader, squares, lp.Pool(shards), cached, web, external, inner, counter
            ),
            label="reader",
        )
        return program

    if __name__ == "__main__":
        outside = http.server.ThreadingHTTPServer(("10.77.0.10", 0), Outside)
        threading.Thread(target=outside.serve_forever, daemon=True).start()
        address = "10.77.0.10:%d" % outside.server_address[1]
        lp.launch(make_program(address), "ssh", **OPTIONS).wait()
"""


@pytest.mark.slow
def test_all_kinds_of_nodes_work_together_on_three_hosts(desk: Desk) -> None:
    folder = str(desk.hosts.shared / "state")
    desk.write(textwrap.dedent(_SQUARES), "squares.py")
    for turn in (1, 2):
        ended = desk.launch(_TOGETHER, hosts="h1,h2,h3", checkpoints=folder).check()
        shards = re.findall(r"\d:(h\d)", ended.stdout)
        assert len({*shards}) == 3, ended.stdout
        assert "external h0" in ended.stdout
        assert f"counter {turn}" in ended.stdout


# Code


def test_a_bare_interpreter_on_the_hosts_is_enough(desk: Desk) -> None:
    desk.write("VALUE = 17\n", "lib/constants.py")
    desk.write("", "lib/__init__.py")
    source = """
        from lib.constants import VALUE

        class Worker(Worker):
            def run(self):
                import cloudpickle
                print("value", VALUE, sys.prefix, cloudpickle.__file__, flush=True)
                super().run()
    """
    python = bare_python(desk.hosts)
    ended = desk.launch(source, _LAUNCH, hosts="h1,h2,h3", python=python).check()
    found = re.findall(r"value 17 (\S+) (\S+)", ended.stdout)
    assert len(found) == 3
    assert {prefix for prefix, _ in found} == {str(Path(python).parents[1])}
    assert all("/.cache/launchpad_lite/trees/" in path for _, path in found)


@pytest.mark.slow
def test_code_is_sent_once_and_what_was_edited_is_sent_anew(desk: Desk) -> None:
    desk.write("VALUE = 1\n", "constants.py")
    source = """
        import constants

        class Worker(Worker):
            def run(self):
                print("value", constants.VALUE, flush=True)
                super().run()
    """
    assert desk.launch(source, _LAUNCH, hosts="h1,h2").check().stdout.count("value 1") == 3
    first = trees(desk.hosts, "h1")
    assert first
    desk.launch(source, _LAUNCH, hosts="h1,h2").check()
    assert trees(desk.hosts, "h1") == first

    desk.write("VALUE = 22\n", "constants.py")
    assert desk.launch(source, _LAUNCH, hosts="h1,h2").check().stdout.count("value 22") == 3
    third = trees(desk.hosts, "h1")
    assert first.items() < third.items()
    assert len(third) == len(first) + 1  # the edited one; our own code is not sent again


@pytest.mark.slow
def test_requirements_are_installed_once(desk: Desk) -> None:
    wheel = desk.hosts.shared / "tiny-1.5-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny.py", "VALUE = 42\n")
        about = {
            "METADATA": "Metadata-Version: 2.1\nName: tiny\nVersion: 1.5\n",
            "WHEEL": "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
            "RECORD": "",
        }
        for name, text in about.items():
            archive.writestr(f"tiny-1.5.dist-info/{name}", text)
    requirements = desk.write(f"--no-index\n{wheel}\n", "requirements.txt")
    source = """
        class Worker(Worker):
            def run(self):
                import importlib
                print("tiny", importlib.import_module("tiny").VALUE, flush=True)
                super().run()
    """
    options = {"hosts": "h1,h2", "requirements": str(requirements), "python": sys.executable}
    first = desk.launch(source, _LAUNCH, timeout_s=180, **options).check()
    assert first.stdout.count("tiny 42") == 3
    wheel.unlink()
    second = desk.launch(source, _LAUNCH, **options).check()
    assert second.stdout.count("tiny 42") == 3
    print(f"with installation {first.seconds:.1f} s, without {second.seconds:.1f} s")


# Refusals


def prepend_to_ssh_config(hosts: SshHosts, text: str) -> None:
    hosts.ssh_config.write_text(textwrap.dedent(text) + hosts.ssh_config.read_text())


@pytest.mark.slow
def test_a_host_that_nobody_knows_is_refused(desk: Desk) -> None:
    ended = desk.launch(hosts="h1,nowhere")
    assert re.search(
        r"^nowhere: ssh ended with exit code 255: .*Could not resolve hostname nowhere",
        ended.refusal,
    )
    assert ended.seconds < 60
    assert_untouched(desk.hosts)


@pytest.mark.slow
def test_a_host_with_another_key_is_refused(desk: Desk) -> None:
    desk.hosts.forget_key("h2")
    ended = desk.launch(hosts="h1,h2")
    assert ended.refusal.startswith("h2: ssh ended with exit code 255: ")
    assert "Host key verification failed" in ended.refusal
    assert ended.seconds < 60
    assert_untouched(desk.hosts)


@pytest.mark.slow
def test_a_host_that_wants_a_password_is_refused_at_once(desk: Desk) -> None:
    prepend_to_ssh_config(desk.hosts, "Host h2\n    PubkeyAuthentication no\n")
    ended = desk.launch(hosts="h1,h2")
    assert ended.refusal.startswith("h2: ssh ended with exit code 255: ")
    assert "Permission denied" in ended.refusal
    assert ended.seconds < 60
    assert_untouched(desk.hosts)


@pytest.mark.slow
def test_a_host_that_is_down_is_refused_in_time(desk: Desk) -> None:
    desk.hosts.cut("h3")
    ended = desk.launch(hosts="h1,h3", connect_s=4)
    assert ended.refusal.startswith("h3: ")
    assert ended.seconds < 60
    desk.hosts.heal("h3")
    assert_untouched(desk.hosts)


@pytest.mark.slow
def test_a_host_without_sshd_is_refused(desk: Desk) -> None:
    desk.hosts.crash("h3")
    ended = desk.launch(hosts="h1,h3")
    assert re.search(r"^h3: ssh ended with exit code 255: .*Connection refused", ended.refusal)
    assert ended.seconds < 60
    desk.hosts.boot("h3")
    assert_untouched(desk.hosts)


@pytest.mark.slow
def test_a_host_without_python_is_refused(desk: Desk) -> None:
    ended = desk.launch(hosts="h1,h2:python=/no/python")
    assert ended.refusal.strip() == (
        "h2: no Python was found: there is no /no/python. Say which one to use: python="
    )
    assert_untouched(desk.hosts)


def test_a_host_with_another_minor_version_is_refused(desk: Desk) -> None:
    python = find_other_minor_version()
    if python is None:
        pytest.skip("there is no other Python here")
    ended = desk.launch(hosts=f"h1,h2:python={python}")
    assert ended.refusal.startswith(f"h2: {python} is CPython 3.")
    assert "code travels between the same minor versions only. Name another" in ended.refusal
    assert_untouched(desk.hosts)


@pytest.mark.parametrize("version", ["3.6", "2.7"])
@pytest.mark.slow
def test_a_host_with_an_old_python_is_refused(desk: Desk, version: str) -> None:
    python = find_python(version)
    if python is None:
        pytest.skip(f"there is no Python {version} here")
    ended = desk.launch(hosts=f"h1,h2:python={python}")
    assert ended.refusal.startswith("h2: ")
    assert version in ended.refusal
    assert "python=" in ended.refusal
    assert_untouched(desk.hosts)


@pytest.mark.slow
def test_packages_that_a_host_lacks_are_told(desk: Desk) -> None:
    source = """
        import numpy

        class Worker(Worker):
            def run(self):
                print(numpy.zeros(1))
    """
    python = bare_python(desk.hosts)
    ended = desk.launch(source, _LAUNCH, hosts=f"h1,h2:python={python}")
    assert re.match(
        rf"h2: the program needs numpy \S+ \(none there\) in {python}\. Install the same",
        ended.refusal,
    )
    assert_untouched(desk.hosts)


@pytest.mark.slow
def test_a_host_with_a_full_disk_is_refused(desk: Desk) -> None:
    desk.hosts.fill_disk("h2")
    ended = desk.launch(hosts="h1,h2")
    assert re.match("h2: no space is left for code in .*: free some, or name", ended.refusal)
    assert ended.seconds < 60
    poll_until(lambda: not desk.hosts.leftovers())
    assert not desk.hosts.files("h2")


@pytest.mark.slow
def test_a_full_disk_is_no_harm_where_another_folder_is_named(desk: Desk) -> None:
    desk.hosts.fill_disk("h2")
    desk.launch(hosts="h1,h2", cache="/tmp/code").check()


@pytest.mark.slow
def test_mistakes_of_all_hosts_are_told_together(desk: Desk) -> None:
    desk.hosts.forget_key("h2")
    desk.hosts.crash("h3")
    text = desk.launch(hosts="h1:python=/no/python,h2,h3,nowhere").refusal
    desk.hosts.boot("h3")
    assert [line.partition(":")[0] for line in text.splitlines() if re.match(r"\w+: ", line)] == [
        "h1",
        "h2",
        "h3",
        "nowhere",
    ]
    assert_untouched(desk.hosts)


@pytest.mark.slow
def test_what_start_up_files_print_does_no_harm(desk: Desk) -> None:
    noise = "echo Welcome to h1; printf '\\\\0\\\\0'; echo careful >&2"
    desk.hosts.run_on("h1", "sh", "-c", f'echo "{noise}" > ~/.bashrc')
    ended = desk.launch(hosts="h1,h2").check()
    assert "Welcome" not in ended.stdout


@pytest.mark.slow
def test_an_interrupt_while_hosts_are_awaited_ends_the_launch_at_once(desk: Desk) -> None:
    desk.hosts.cut("h2")
    script = desk.write(textwrap.dedent(_STORE) + textwrap.dedent(_LAUNCH))
    with desk.start([sys.executable, str(script)], hosts="h1,h2", connect_s=100) as process:
        poll_until(lambda: desk.hosts.processes("h1"), 40)
        begin = time.monotonic()
        process.send_signal(2)
        process.communicate(timeout=50)
    assert time.monotonic() - begin < 40
    desk.hosts.heal("h2")
    assert_untouched(desk.hosts)


# Placement


_VISIBLE = """
    class Worker(Worker):
        def run(self):
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")
            print(f"{self.index} sees [{visible}] on {socket.gethostname()}", flush=True)
            super().run()
"""


@pytest.mark.slow
def test_accelerators_are_divided_among_nodes(desk: Desk) -> None:
    desk.hosts.run_on("h2", "sh", "-c", "echo 'export CUDA_VISIBLE_DEVICES=4,5,6' > ~/.bashrc")
    ended = desk.launch(
        _VISIBLE,
        _LAUNCH,
        hosts=["h1", "h2:gpu=2"],
        resources={"worker[0]": {"gpu": 1}, "worker[2]": {"gpu": 1}},
    ).check()
    assert sorted(re.findall(r"(\d) sees \[(\d)\] on h2", ended.stdout)) == [("0", "4"), ("2", "5")]


@pytest.mark.slow
def test_more_accelerators_than_there_are_is_explained_before_anything_starts(desk: Desk) -> None:
    ended = desk.launch(hosts=["h1", "h2:gpu=2"], resources={"worker[0]": {"gpu": 2}})
    assert "worker[0]" in ended.refusal
    assert "gpu" in ended.refusal
    assert " on " not in ended.stdout


def test_nodes_run_where_the_plan_says(desk: Desk) -> None:
    source = """
        if __name__ == "__main__":
            plan = lp.plan(make_program(), "ssh", **OPTIONS)
            print(plan)
            running = lp.launch(make_program(), "ssh", **OPTIONS)
            assert {node.name: node.host for node in running.status()} == dict(plan.hosts)
            running.wait()
    """
    placement = {"store": "h3", "worker": ["h1", "h2"]}
    ended = desk.launch(source, hosts="h1,h2,h3", placement=placement).check()
    assert re.search(r"store\[0\]  CourierNode\(Store\) +on h3", ended.stdout)
    assert {*re.findall(r"\d on (h\d) called h3", ended.stdout)} == {"h1", "h2"}


# Addresses


_STATUS = """
    if __name__ == "__main__":
        running = lp.launch(make_program(), "ssh", **OPTIONS)
        print("ENDPOINTS", json.dumps({n.name: n.endpoints["courier"] for n in running.status()}))
        running.wait()
"""


def endpoints(ended: Ended) -> dict[str, str]:
    (line,) = re.findall(r"ENDPOINTS (.*)", ended.stdout)
    found: dict[str, str] = json.loads(line)
    return {node: address.rpartition(":")[0] for node, address in found.items()}


@pytest.mark.slow
def test_of_many_addresses_one_that_works_is_chosen_and_shown(tmp_path: Path) -> None:
    with lent(SshHosts(2, extra_addresses=[f"{_BRIDGE}/16", "192.168.9.1/24"])) as hosts:
        ended = Desk(hosts, tmp_path).launch(_STATUS, hosts="h1,h2", tunnel="never").check()
        assert endpoints(ended) == {
            "store[0]": hosts.addresses["h1"],
            "worker[0]": hosts.addresses["h2"],
            "worker[1]": hosts.addresses["h1"],
            "worker[2]": hosts.addresses["h2"],
        }


@pytest.mark.slow
def test_an_address_that_leads_elsewhere_is_not_believed(tmp_path: Path) -> None:
    with lent(SshHosts(2, extra_addresses=[f"{_BRIDGE}/16"])) as hosts:
        choice = [f"h1:address={_BRIDGE}", "h2"]
        ended = Desk(hosts, tmp_path).launch(_STATUS, hosts=choice, tunnel="never")
        assert f"h2 does not reach h1 (tried {_BRIDGE})" in ended.refusal


@pytest.mark.slow
def test_an_address_that_is_named_is_taken(desk: Desk) -> None:
    ended = desk.launch(_STATUS, hosts=["h1:address=10.77.0.11", "h2:address=h2"]).check()
    assert {*endpoints(ended).values()} == {"10.77.0.11", "h2"}


def separate(hosts: SshHosts, *names: str) -> None:
    for source in names:
        for target in names:
            if source != target:
                hosts.block(source, target)


@pytest.mark.parametrize("tunnel", ["auto", "always"])
@pytest.mark.slow
def test_hosts_that_do_not_reach_each_other_call_through_the_launcher(
    desk: Desk, tunnel: str
) -> None:
    separate(desk.hosts, "h1", "h2", "h3")
    ended = desk.launch(hosts="h1,h2,h3", tunnel=tunnel).check()
    assert len(re.findall(r"\d on h\d called h1", ended.stdout)) == 3


@pytest.mark.slow
def test_without_tunnels_it_is_told_who_does_not_reach_whom(desk: Desk) -> None:
    separate(desk.hosts, "h1", "h2")
    ended = desk.launch(hosts="h1,h2,h3", tunnel="never")
    assert re.match(
        r"nodes call each other that are on hosts which do not reach each other: "
        r"h2 does not reach h1 \(tried 10\.77\.0\.11\)\. Allow connections",
        ended.refusal,
    )
    assert "h3 does not reach" not in ended.refusal
    poll_until(lambda: not desk.hosts.leftovers())


@pytest.mark.slow
def test_the_script_calls_nodes_through_the_tunnel_as_well(desk: Desk) -> None:
    source = """
        if __name__ == "__main__":
            program = make_program(0)
            running = lp.launch(program, "ssh", **OPTIONS)
            store = program.groups["store"][0].create_handle().dereference()
            print("HOST", store.add("script"))
            running.stop()
            running.wait()
    """
    ended = desk.launch(source, hosts="h1,h2", tunnel="always").check()
    assert "HOST h1" in ended.stdout


@pytest.mark.slow
def test_large_arrays_and_many_calls_pass_the_tunnel(desk: Desk) -> None:
    source = """
        class Worker(Worker):
            def run(self):
                import numpy
                begin = time.monotonic()
                sent = numpy.arange(8 << 20)  # 64 MiB
                assert (self.store.echo(sent) == sent).all()
                large_s = time.monotonic() - begin
                futures = [self.store.futures.echo(bytes(1000) + b"%d" % n) for n in range(500)]
                for number, future in enumerate(futures):
                    assert future.result() == bytes(1000) + b"%d" % number
                seconds = time.monotonic() - begin
                print(f"there and back {large_s:.1f} s, in all {seconds:.1f} s", flush=True)
    """
    ended = desk.launch(
        source,
        _LAUNCH,
        hosts="h1,h2",
        tunnel="always",
        placement={"store": "h1", "worker": "h2"},
    ).check()
    assert ended.stdout.count("there and back") == 3
    print(ended.stdout)


@pytest.mark.slow
def test_a_server_that_does_not_read_holds_up_nobody_and_not_the_stop(desk: Desk) -> None:
    source = """
        import signal, threading

        class Frozen(Store):
            def freeze(self):
                threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGSTOP)).start()

        class Caller:
            def __init__(self, frozen, store):
                self.frozen, self.store = frozen, store

            def flood(self):
                self.unread = [self.frozen.futures.echo(bytes(4 << 20)) for _ in range(32)]

            def run(self):
                self.frozen.freeze()
                # Whoever sends more than is on its way waits, as with any connection.
                threading.Thread(target=self.flood, daemon=True).start()
                longest = 0.0
                end = time.monotonic() + 3
                while time.monotonic() < end:
                    begin = time.monotonic()
                    self.store.add("x")
                    longest = max(longest, time.monotonic() - begin)
                print(f"longest {longest:.2f}", flush=True)
                lp.stop()

        if __name__ == "__main__":
            program = lp.Program("slow")
            frozen = program.add_node(lp.CourierNode(Frozen), label="frozen")
            store = program.add_node(lp.CourierNode(Store), label="store")
            program.add_node(lp.CourierNode(Caller, frozen, store), label="caller")
            running = lp.launch(program, "ssh", notice_s=1, **OPTIONS)
            begin = time.monotonic()
            result = running.wait()
            print("KILLED", *result.killed, f"after {time.monotonic() - begin:.1f} s")
    """
    placement = {"frozen": "h1", "store": "h1", "caller": "h2"}
    ended = desk.launch(source, hosts="h1,h2", tunnel="always", placement=placement).check()
    (longest,) = re.findall(r"longest (\S+)", ended.stdout)
    assert float(longest) < 20  # held up, it would wait for ever
    assert re.search(r"KILLED .*frozen\[0\]", ended.stdout)
    (after,) = re.findall(r"after (\S+) s", ended.stdout)
    assert float(after) < 40


# What is seen of it


@pytest.mark.slow
def test_output_of_all_hosts_is_merged_and_kept_here(desk: Desk) -> None:
    source = """
        class Worker(Worker):
            def run(self):
                print("a line of", self.index, flush=True)
                print("a complaint of", self.index, file=sys.stderr, flush=True)
                super().run()
    """
    ended = desk.launch(source, _LAUNCH, hosts="h1,h2,h3").check()
    for index in range(3):
        assert f"[worker[{index}]] a line of {index}\n" in ended.stdout
        assert f"[worker[{index}]] a complaint of {index}\n" in ended.stdout
        log = desk.log(f"worker/{index}")
        assert f"a line of {index}\na complaint of {index}\n" in log
    assert not [
        file for name in desk.hosts.names for file in desk.hosts.files(name) if ".log" in file
    ]


@pytest.mark.slow
def test_the_status_shows_host_process_use_and_restarts(desk: Desk) -> None:
    source = """
        class Busy:
            def whoami(self):
                return socket.gethostname(), os.getpid()

            def fail(self):
                os._exit(3)

            def run(self):
                while not lp.wait_for_stop(0):
                    sum(range(100_000))

        if __name__ == "__main__":
            program = lp.Program("busy")
            program.add_node(lp.CourierNode(Busy), label="busy")
            running = lp.launch(program, "ssh", restart="on_failure", **OPTIONS)
            client = program.groups["busy"][0].create_handle().dereference()
            first = client.whoami()
            try:
                client.fail()
            except courier.CourierError:
                pass
            while (second := client.whoami()) == first:
                time.sleep(0.05)
            # What the launcher hears of, and what is measured, comes later than an answer.
            while (status := running.status()[0]).pid != second[1] or status.restarts != 1:
                time.sleep(0.05)
            while not 0.05 < ((status := running.status()[0]).cpu or 0) < 4:
                time.sleep(0.05)
            print("STATUS", json.dumps([status.host, status.pid, status.restarts]), list(second))
            assert 10 < status.memory_mib < 1000, status
            running.stop()
            running.wait()
    """
    ended = desk.launch(source, hosts=["h1", "h2"], placement={"busy": "h2"}).check()
    (host, pid), (restarts,) = (
        re.findall(r'STATUS \["(h\d)", (\d+)', ended.stdout)[0],
        re.findall(r"STATUS .*?, (\d)\]", ended.stdout),
    )
    assert (host, restarts) == ("h2", "1")
    assert f"['h2', {pid}]" in ended.stdout


# Security


_ATTACK = """
    import os, pathlib, pickle, socket, ssl, struct, sys
    import courier
    from launchers._trust import Authority

    host, port = sys.argv[1].split(":")
    address = host, int(port)

    class Bomb:
        def __reduce__(self):
            return os.system, ("touch /tmp/exploded",)

    bomb = pickle.dumps(Bomb())

    def read(sock):
        sock.settimeout(2)
        data = b""
        try:
            while piece := sock.recv(4096):
                data += piece
        except OSError:
            pass
        return data

    # Bytes of many kinds over plain TCP.
    for data in (
        bomb,
        b"\\0" * 100,
        b"\\xff" * 70000,
        b"GET / HTTP/1.1\\r\\n\\r\\n",
        b"PRI * HTTP/2.0\\r\\n\\r\\nSM\\r\\n\\r\\n" + bomb,
        struct.pack("!IQ", len(bomb), 0) + bomb,
    ):
        with socket.create_connection(address, 5) as sock:
            try:
                sock.sendall(data)
                answer = read(sock)
            except OSError:
                answer = b""
            # An alert of TLS at most.
            assert len(answer) < 10, answer

    # TLS without a certificate of ours, and with one of another authority.
    def speak(context):
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        with socket.create_connection(address, 5) as sock:
            try:
                with context.wrap_socket(sock) as tls:
                    tls.sendall(bomb)
                    return read(tls)
            except OSError:
                return b""

    assert speak(ssl.create_default_context()) == b""
    stranger = Authority("stranger").issue("stranger", [host])

    # Clients of ours.
    # Who has learnt the secret is not heard either, without a certificate.
    for secret in (None, courier.Secret.generate(), courier.Secret(bytes.fromhex(sys.argv[2]))):
        for tls in (None, stranger):
            client = courier.Client(
                sys.argv[1], secret=secret, tls=tls, wait_for_ready=False, call_timeout=3
            )
            for call in (lambda: client.add(Bomb()), client.count, lambda: client.echo(1)):
                try:
                    answer = call()
                except courier.CourierError as error:
                    print("refused:", type(error).__name__)
                else:
                    raise AssertionError(answer)

    # gRPC.
    import grpc

    credentials = (None, grpc.ssl_channel_credentials())
    for one in credentials:
        channel = grpc.secure_channel(sys.argv[1], one) if one else grpc.insecure_channel(sys.argv[1])
        with channel:
            for method in ("Hello", "Call", "Send", "Fetch"):
                call = channel.unary_unary(f"/courier.v1.Courier/{method}")
                try:
                    call(bomb, timeout=2)
                except grpc.RpcError as error:
                    print("refused:", error.code())
                else:
                    raise AssertionError(method)
    print("ALL REFUSED")
"""
_SERVE = """
    if __name__ == "__main__":
        program = make_program(0)
        running = lp.launch(program, "ssh", **OPTIONS)
        store = program.groups["store"][0].create_handle().dereference()
        store.add("launcher")
        shown = {node.name: node.endpoints["courier"] for node in running.status()}
        secret = running._table.secret.reveal() if hasattr(running, "_table") else b""
        aside = pathlib.Path("serving.new")
        aside.write_text(json.dumps([shown["store[0]"], secret.hex()]))
        aside.rename("serving")
        while not pathlib.Path("enough").exists():
            time.sleep(0.05)
        print("COUNT", store.count())
        running.stop()
        running.wait()
"""


@contextlib.contextmanager
def serving(desk: Desk, **options: Any) -> Iterator[tuple[str, str]]:
    """A program with a store on h1; gives the store's endpoint and the program's secret."""
    script = desk.write(textwrap.dedent(_STORE) + textwrap.dedent(_SERVE))
    process = desk.start([sys.executable, str(script)], **options)
    try:
        ready = desk.folder / "serving"
        poll_until(lambda: ready.exists() or process.poll() is not None, 60)
        assert ready.exists(), process.communicate()
        endpoint, secret = json.loads(ready.read_text())
        yield endpoint, secret
        (desk.folder / "enough").touch()
        stdout, stderr = process.communicate(timeout=60)
        assert process.returncode == 0, stderr
        assert "COUNT 1\n" in stdout  # of the launcher; nobody else was heard
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_nobody_without_secret_and_certificate_is_heard(desk: Desk) -> None:
    # From a third host, which sees no more of ours than what the attacker brings along.
    brought = desk.hosts.shared / "attack"
    for package in ("courier", "launchers", "launchpad_lite"):
        shutil.copytree(
            _CHECKOUT / package, brought / package, ignore=shutil.ignore_patterns("__pycache__")
        )
    (brought / "attack.py").write_text(textwrap.dedent(_ATTACK))
    with serving(desk, hosts="h1,h2") as (endpoint, secret):
        command = [sys.executable, str(brought / "attack.py"), endpoint, secret]
        assert "ALL REFUSED" in desk.hosts.run_on("h3", *command)
        assert not [name for name in desk.hosts.names if "/tmp/exploded" in desk.hosts.files(name)]
        assert not Path("/tmp/exploded").exists()


@pytest.mark.slow
def test_nothing_secret_is_in_arguments_environments_or_files_of_others(desk: Desk) -> None:
    with serving(desk, hosts="h1,h2") as (_, secret):
        assert len(secret) >= 32
        words = [secret.encode(), bytes.fromhex(secret), b"PRIVATE KEY", b"BEGIN CERTIFICATE"]
        seen = 0
        for name in (LAUNCHER, *desk.hosts.names):
            for process in desk.hosts.processes(name):
                folder = Path(f"/proc/{process.pid}")
                with contextlib.suppress(OSError):
                    text = (folder / "cmdline").read_bytes() + (folder / "environ").read_bytes()
                    seen += 1
                    assert not [word for word in words if word in text], text
        assert seen >= 6  # launcher, ssh twice, wardens, agents, the store
        for name in ("h1", "h2"):
            open_to_all = desk.hosts.run_on(
                # The interpreter of these tests may lie in /tmp; what it writes has the user's modes.
                name,
                "sh",
                "-c",
                f"find ~/.cache /tmp /dev/shm -path {sys.prefix} -prune -o -name __pycache__ -prune "
                "-o -type f -perm /077 -print",
            )
            assert not open_to_all
            kept = desk.hosts.run_on(
                name,
                "sh",
                "-c",
                f"grep -rlE --exclude-dir={Path(sys.prefix).name} 'BEGIN (EC |RSA )?PRIVATE KEY' "
                "/tmp /dev/shm /run || true",
            )
            assert not kept


# Many


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_thirty_hosts(tmp_path: Path) -> None:
    with lent(SshHosts(30)) as hosts:
        desk = Desk(hosts, tmp_path)
        source = """
            if __name__ == "__main__":
                for turn in ("first", "second"):
                    begin = time.monotonic()
                    running = lp.launch(make_program(30), "ssh", **OPTIONS)
                    print(f"{turn} launch of 30 hosts: {time.monotonic() - begin:.1f} s")
                    running.wait()
                    print(f"{turn} run of 30 hosts: {time.monotonic() - begin:.1f} s")
        """
        ended = desk.launch(source, timeout_s=280, hosts="h[1-30]", notice_s=60).check()
        print("\n".join(re.findall(r".* of 30 hosts: .*", ended.stdout)))
        assert len({*re.findall(r"\d+ on (h\d+) called h1", ended.stdout)}) == 30
