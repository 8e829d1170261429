"""What users see of programs on several hosts, over real ssh, beside what all engines do.

Crashes and cuts are in `test_ssh_faults`.
"""

import contextlib
import re
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from launchpad_lite.testing import poll_until
from tests.beds.ssh_hosts import LAUNCHER, SshHosts
from tests.engines import needs_ssh_hosts
from tests.launchers.host_engines import CHECKOUT, Command, SshDesk, desk_on

pytestmark = [needs_ssh_hosts, pytest.mark.slow, pytest.mark.timeout(300)]

#: Containers of this machine may have it as well; it leads nowhere.
_BRIDGE = "172.17.0.1"
_BRIEF = {"brief": True}


def bare_python(hosts: SshHosts) -> str:
    """An interpreter without any packages, on all hosts."""
    folder = hosts.shared / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    return str(folder / "bin" / "python")


@contextlib.contextmanager
def lent(bed: SshHosts, folder: Path) -> Iterator[SshDesk]:
    """A desk at a bed of one's own, which must be left as tidy as that of all."""
    with bed, desk_on(bed, lambda: SshDesk(bed, folder)) as desk:
        yield desk


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


def called(output: str) -> dict[str, str]:
    """The hosts of callers, and that which they called, by index of the caller."""
    return {
        index: f"{here} to {there}"
        for index, here, there in re.findall(r"(\d+) on (h\d+) called (h\d+)", output)
    }


def test_doctor_reaches_hosts_as_a_launch_does(ssh: SshDesk) -> None:
    command = [sys.executable, "-m", "launchpad_lite.launch", "doctor", "h1", "nowhere"]
    with ssh.popen(command, stdout=subprocess.PIPE, text=True, cwd=CHECKOUT) as doctor:
        told, _ = doctor.communicate(timeout=60)
    found = {line.partition(": ")[0]: line for line in told.splitlines()}
    assert doctor.returncode == 1
    assert "ok    ssh" in found
    assert (
        f"its agent answered; it is reached at {ssh.hosts.addresses['h1']}"
        in found["ok    host h1"]
    )
    assert "Could not resolve hostname nowhere" in found["fail  host nowhere"]


# Programs


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

    class Inner:
        def __init__(self, outer):
            self.outer = outer

        def host(self):
            return socket.gethostname()

    class Reader:
        def __init__(self, squares, shards, cached, web, external, inner):
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
        web = program.add_node(
            lp.CommandNode(
                [sys.executable, "-m", "http.server", "{http.port}"], listens=["http"], cwd="/"
            ),
            label="web",
        )
        external = program.add_node(lp.ExternalNode(address, client=as_url), label="external")
        first = lp.CourierNode(Store, HOW)
        handle = first.create_handle()
        second = lp.CourierNode(Inner, handle)
        inner = second.create_handle()
        program.add_node(lp.ColocationNode([first, second]), label="pair")
        program.add_node(
            lp.CourierNode(Reader, squares, lp.Pool(shards), cached, web, external, inner),
            label="reader",
        )
        return program

    if __name__ == "__main__":
        outside = http.server.ThreadingHTTPServer(("10.77.0.10", 0), Outside)
        threading.Thread(target=outside.serve_forever, daemon=True).start()
        address = "10.77.0.10:%d" % outside.server_address[1]
        lp.launch(make_program(address), LAUNCHER, **OPTIONS).wait()
"""


def test_all_kinds_of_nodes_work_together_on_three_hosts(ssh: SshDesk) -> None:
    ssh.write(textwrap.dedent(_SQUARES), "squares.py")
    output = ssh.launch(_TOGETHER, placement=None).check()
    assert len({*re.findall(r"\d:(h\d)", output)}) == 3, output
    assert "external h0" in output


def test_output_is_kept_here_only(ssh: SshDesk) -> None:
    ssh.launch(how=_BRIEF).check()
    assert "complaint" in ssh.log("caller/1")
    assert not [
        file for name in ssh.hosts.names for file in ssh.hosts.files(name) if ".log" in file
    ]


# Code


def test_a_bare_python_is_enough_and_what_was_edited_is_sent_anew(ssh: SshDesk) -> None:
    source = """
        from lib.constants import VALUE

        class Caller(Caller):
            def run(self):
                import cloudpickle
                print("value", VALUE, sys.prefix, cloudpickle.__file__, flush=True)
                super().run()
    """
    python = bare_python(ssh.hosts)
    ssh.write("", "lib/__init__.py")
    kept = {}
    for value in (1, 22):  # of another length, so that no bytecode of the first is taken
        ssh.write(f"VALUE = {value}\n", "lib/constants.py")
        output = ssh.launch(source, how=_BRIEF, python=python).check()
        found = re.findall(rf"value {value} (\S+) (\S+)", output)
        assert {prefix for prefix, _ in found} == {str(Path(python).parents[1])}
        assert len(found) == 2
        assert all("/.cache/launchpad_lite/trees/" in path for _, path in found)
        kept[value] = trees(ssh.hosts, "h1")
    assert kept[1]
    assert kept[1].items() < kept[22].items()
    assert len(kept[22]) == len(kept[1]) + 1  # the edited one; all else is not sent again


def test_requirements_are_installed_once(ssh: SshDesk, package: Path) -> None:
    wheel = Path(shutil.copy(package, ssh.hosts.shared))
    requirements = ssh.write(f"--no-index\n{wheel}\n", "requirements.txt")
    source = """
        class Caller(Caller):
            def run(self):
                import importlib
                print("tiny", importlib.import_module("tiny").VALUE, flush=True)
                super().run()
    """
    options: dict[str, Any] = {
        "requirements": str(requirements),
        "python": sys.executable,
        "how": _BRIEF,
    }
    assert ssh.launch(source, **options).check(180).count("tiny 42") == 2
    wheel.unlink()
    assert ssh.launch(source, **options).check().count("tiny 42") == 2


# Refusals


def test_mistakes_of_all_hosts_are_told_together(ssh: SshDesk) -> None:
    ssh.hosts.forget_key("h2")
    ssh.hosts.crash("h3")
    hosts = ["h1:python=/no/python", "h2", "h3", "nowhere"]
    told = refusals(ssh.launch(hosts=hosts, placement=None))
    assert [*told] == ["h1", "h2", "h3", "nowhere"]
    no_python = "no Python was found: there is no /no/python. Say which one to use: python="
    assert told.pop("h1") == no_python
    failed = "ssh ended with exit code 255: "
    assert all(text.startswith(failed) for text in told.values())
    assert "Host key verification failed" in told["h2"]
    assert "Connection refused" in told["h3"]
    assert "Could not resolve hostname nowhere" in told["nowhere"]
    ssh.hosts.boot("h3")
    assert_untouched(ssh.hosts)


def refusals(launch: Command) -> dict[str, str]:
    """What is said of each host."""
    text = launch.refusal()
    return dict(re.findall(r"^(\w+): ((?:.|\n(?!\w+: ))*)(?:\n|$)", text, re.MULTILINE))


def test_packages_that_a_host_lacks_and_a_full_disk_are_told(ssh: SshDesk) -> None:
    source = """
        import numpy

        class Caller(Caller):
            def run(self):
                print(numpy.zeros(1))
    """
    python = bare_python(ssh.hosts)
    refusal = ssh.launch(source, hosts=["h1", f"h2:python={python}", "h3"]).refusal()
    assert re.match(
        rf"h2: the program needs numpy \S+ \(none there\) in {python}\. Install the same", refusal
    )
    poll_until(lambda: not ssh.hosts.leftovers())
    assert not ssh.hosts.files("h2")

    ssh.hosts.fill_disk("h2")
    refusal = ssh.launch().refusal()
    assert re.match("h2: no space is left for code in .*: free some, or name", refusal)
    poll_until(lambda: not ssh.hosts.leftovers())
    assert not ssh.hosts.files("h2")
    ssh.launch(how=_BRIEF, cache="/tmp/code").check()


def test_an_interrupt_while_hosts_are_awaited_ends_the_launch_at_once(ssh: SshDesk) -> None:
    ssh.hosts.cut("h2")
    run = ssh.launch(connect_s=100)
    poll_until(lambda: ssh.hosts.processes("h1"), 40)
    run.send(signal.SIGINT)
    run.end(50)
    ssh.hosts.heal("h2")
    assert_untouched(ssh.hosts)


# Placement and addresses


def test_accelerators_are_divided_and_what_start_up_files_print_does_no_harm(ssh: SshDesk) -> None:
    lines = r"echo Welcome; printf '\0\0'; echo careful >&2; export CUDA_VISIBLE_DEVICES=4,5,6"
    ssh.hosts.run_on("h2", "sh", "-c", 'printf %s "$1" > ~/.bashrc', "sh", lines)
    source = """
        class Caller(Caller):
            def run(self):
                visible = os.environ.get("CUDA_VISIBLE_DEVICES")
                print(f"{self.index} sees [{visible}] on {socket.gethostname()}", flush=True)
                super().run()
    """
    output = ssh.launch(
        source,
        how={"brief": True, "callers": 3},
        hosts=["h1", "h2:gpu=2"],
        placement=None,
        resources={"caller[0]": {"gpu": 1}, "caller[2]": {"gpu": 1}},
    ).check()
    assert sorted(re.findall(r"(\d) sees \[(\d)\] on h2", output)) == [("0", "4"), ("2", "5")]
    assert "Welcome" not in output


_STATUS = """
    if __name__ == "__main__":
        print(lp.plan(make_program(), LAUNCHER, **OPTIONS))
        running = lp.launch(make_program(), LAUNCHER, **OPTIONS)
        for node in running.status():
            print("STATUS", node.name, node.host, node.endpoints["courier"])
        running.wait()
"""


def endpoints(output: str) -> dict[str, list[str]]:
    """Host and address of each node."""
    return {node: where for node, *where in re.findall(r"STATUS (\S+) (\S+) (\S+):\d+", output)}


def test_nodes_run_where_the_plan_says_at_the_addresses_that_were_named(ssh: SshDesk) -> None:
    hosts = ["h1", "h2:address=10.77.0.12", "h3:address=h3"]
    output = ssh.launch(_STATUS, how=_BRIEF, hosts=hosts).check()
    assert re.search(r"store\[0\]  CourierNode\(Store\) +on h2", output)
    assert endpoints(output) == {
        "store[0]": ["h2", "10.77.0.12"],
        "caller[0]": ["h1", ssh.hosts.addresses["h1"]],
        "caller[1]": ["h3", "h3"],
    }
    assert called(output) == {"0": "h1 to h2", "1": "h3 to h2"}


def test_of_many_addresses_one_is_chosen_that_does_not_lead_elsewhere(tmp_path: Path) -> None:
    bed = SshHosts(2, extra_addresses=[f"{_BRIDGE}/16", "192.168.9.1/24"])
    with lent(bed, tmp_path) as desk:
        options: dict[str, Any] = {"how": _BRIEF, "tunnel": "never", "placement": None}
        output = desk.launch(_STATUS, hosts="h1,h2", **options).check()
        assert dict(endpoints(output).values()) == {
            name: bed.addresses[name] for name in ("h1", "h2")
        }
        refusal = desk.launch(hosts=[f"h1:address={_BRIDGE}", "h2"], **options).refusal()
        assert f"h2 does not reach h1 (tried {_BRIDGE})" in refusal


def test_hosts_that_have_ipv6_alone_are_reached_by_number_by_name_and_through_tunnels(
    tmp_path: Path,
) -> None:
    bed = SshHosts(2, ipv6=True)
    options: dict[str, Any] = {"how": _BRIEF, "placement": None}
    with lent(bed, tmp_path) as desk:
        number = bed.addresses["h1"]
        output = desk.launch(_STATUS, hosts=[f"[{number}]", "h2:address=h2"], **options).check()
        assert endpoints(output)["store[0]"] == [number, f"[{number}]"]
        assert endpoints(output)["caller[0]"] == ["h2", "h2"]
        assert called(output) == {"0": "h2 to h1", "1": "h1 to h1"}
        output = desk.launch(_STATUS, hosts="h1,h2", tunnel="always", **options).check()
        assert endpoints(output)["caller[0]"] == ["h2", "[::1]"]
        assert called(output) == {"0": "h2 to h1", "1": "h1 to h1"}


# Tunnels


def separate(hosts: SshHosts, *names: str) -> None:
    for source in names:
        for target in names:
            if source != target:
                hosts.block(source, target)


def test_hosts_that_do_not_reach_each_other_call_through_the_launcher(ssh: SshDesk) -> None:
    separate(ssh.hosts, "h1", "h2", "h3")
    run = ssh.begin(how={"calls": True})
    run.until("^THE SCRIPT CALLED h2$")  # which is outside of the tunnel's hosts
    run.finish()
    assert called(run.output) == {"0": "h1 to h2", "1": "h3 to h2"}

    refusal = ssh.launch(hosts="h1,h2", placement={"store": "h1"}, tunnel="never").refusal()
    assert re.match(
        r"nodes call each other that are on hosts which do not reach each other: "
        r"h2 does not reach h1 \(tried 10\.77\.0\.11\)\. Allow connections",
        refusal,
    )
    poll_until(lambda: not ssh.hosts.leftovers())


# Security


#: What a server is to whom it does not know, tests of courier show.
_ATTACK = """
    import os, sys
    import courier
    from launchers.hosts.trust import Authority

    class Bomb:
        def __reduce__(self):
            return os.system, ("touch /tmp/exploded",)

    stranger = Authority("stranger").issue("stranger", [sys.argv[1].split(":")[0]])

    # Who has learnt the secret is not heard either, without a certificate.
    for secret in (None, courier.Secret.generate(), courier.Secret(bytes.fromhex(sys.argv[2]))):
        for tls in (None, stranger):
            client = courier.Client(
                sys.argv[1], secret=secret, tls=tls, wait_for_ready=False, call_timeout=3
            )
            for call in (lambda: client.add(Bomb()), client.count):
                try:
                    answer = call()
                except courier.CourierError as error:
                    print("refused:", type(error).__name__)
                else:
                    raise AssertionError(answer)
    print("ALL REFUSED")
"""
_SERVE = """
    if __name__ == "__main__":
        program = make_program(0)
        running = lp.launch(program, LAUNCHER, **OPTIONS)
        store = program.groups["store"][0].create_handle().dereference()
        (status,) = running.status()
        secret = running._table.secret.reveal()
        tell(pathlib.Path(HOW["shared"]), "serving", [status.endpoints["courier"], secret.hex()])
        while not (pathlib.Path(HOW["shared"]) / "enough").exists():
            time.sleep(0.05)
        print("COUNT", store.add()[1])
        running.stop()
"""


def test_nobody_else_is_heard_and_nothing_secret_is_open(ssh: SshDesk) -> None:
    # From a host without nodes, which sees no more of ours than what the attacker brings along.
    brought = ssh.shared / "attack"
    for package in ("courier", "launchers", "launchpad_lite"):
        shutil.copytree(
            CHECKOUT / package, brought / package, ignore=shutil.ignore_patterns("__pycache__")
        )
    (brought / "attack.py").write_text(textwrap.dedent(_ATTACK))
    run = ssh.launch(_SERVE, hosts="h1,h2", placement=None)
    poll_until(lambda: run.told("serving") or run.process.poll() is not None, 60)
    assert run.told("serving"), run.output
    endpoint, secret = run.told("serving")
    command = [sys.executable, str(brought / "attack.py"), endpoint, secret]
    assert "ALL REFUSED" in ssh.hosts.run_on("h3", *command)
    assert not [name for name in ssh.hosts.names if "/tmp/exploded" in ssh.hosts.files(name)]
    assert not Path("/tmp/exploded").exists()
    assert_no_process_shows(ssh.hosts, secret)
    assert_no_file_is_open_to_others(ssh.hosts, "h1", "h2")
    run.say("enough")
    assert "COUNT 1\n" in run.check()  # of the launcher; nobody else was heard


def assert_no_process_shows(hosts: SshHosts, secret: str) -> None:
    """Neither in arguments nor in environments."""
    assert len(secret) >= 32
    words = [secret.encode(), bytes.fromhex(secret), b"PRIVATE KEY", b"BEGIN CERTIFICATE"]
    seen = 0
    for name in (LAUNCHER, *hosts.names):
        for process in hosts.processes(name):
            folder = Path(f"/proc/{process.pid}")
            with contextlib.suppress(OSError):
                text = (folder / "cmdline").read_bytes() + (folder / "environ").read_bytes()
                seen += 1
                assert not [word for word in words if word in text], text
    assert seen >= 6  # launcher, ssh twice, reapers, agents, the store


def assert_no_file_is_open_to_others(hosts: SshHosts, *names: str) -> None:
    for name in names:
        open_to_all = hosts.run_on(
            # The interpreter of these tests may lie in /tmp; what it writes has the user's modes.
            name,
            "sh",
            "-c",
            f"find ~/.cache /tmp /dev/shm -path {sys.prefix} -prune -o -name __pycache__ -prune "
            "-o -type f -perm /077 -print",
        )
        assert not open_to_all
        kept = hosts.run_on(
            name,
            "sh",
            "-c",
            f"grep -rlE --exclude-dir={Path(sys.prefix).name} 'BEGIN (EC |RSA )?PRIVATE KEY' "
            "/tmp /dev/shm /run || true",
        )
        assert not kept


# Many


def test_thirty_hosts(tmp_path: Path) -> None:
    with lent(SshHosts(30), tmp_path) as desk:
        run = desk.launch(
            how={"brief": True, "callers": 30}, hosts="h[1-30]", placement=None, notice_s=60
        )
        hosts = [where.split()[0] for where in called(run.check(280)).values()]
        assert len(set(hosts)) == 30
