"""Programs in scripts of their own: exit codes, reports, flags of the script, Ctrl-C."""

import asyncio
import re
import subprocess
import sys
import unittest.mock
from pathlib import Path
from typing import Any

import pytest

import courier
import launchpad_lite as lp
from tests.launchers.scripts import without_logs_line

FLAGS_SCRIPT = """
import enum
from absl import flags
import launchpad_lite as lp
import more_flags

class Color(enum.Enum):
    RED = 1
    BLUE = 2

flags.DEFINE_integer("count", 1, "")
flags.DEFINE_bool("fast", False, "")
flags.DEFINE_enum("mode", "train", ["train", "test"], "")
flags.DEFINE_enum_class("color", Color.RED, Color, "")
flags.DEFINE_list("names", ["x"], "")
flags.DEFINE_string("set_later", "default", "")
flags.DEFINE_string("untouched", "as defined", "")
FLAGS = flags.FLAGS

class Worker:
    def __init__(self, colors):
        self.colors = colors

    def run(self):
        print("main", FLAGS.count, FLAGS.fast, FLAGS.mode, FLAGS.names, FLAGS.set_later)
        print("rest", FLAGS.color is Color.BLUE, FLAGS.color is self.colors[0], FLAGS.untouched)
        print("imported", FLAGS.rate, FLAGS.kept)
        import more_flags
        print("later", more_flags.RATE.value, FLAGS.rate, FLAGS.kept)

if __name__ == "__main__":
    FLAGS_PARSE
    program = lp.Program("flags")
    program.add_node(lp.PyClassNode(Worker, [Color.BLUE]), label="worker")
    lp.launch(program).wait()
"""

PROGRAMMATIC = """
    import sys
    FLAGS(sys.argv)
    FLAGS.set_later = "by hand"
    more_flags.flags.FLAGS.kept = 7
"""


@pytest.fixture
def more_flags(tmp_path: Path) -> None:
    (tmp_path / "more_flags.py").write_text(
        "from absl import flags\n"
        'RATE = flags.DEFINE_float("rate", 0.5, "")\n'
        'flags.DEFINE_integer("kept", 3, "")\n'
    )


@pytest.mark.usefixtures("more_flags")
@pytest.mark.parametrize("launcher", ["--launcher=local_mp", "--lp_launch_type=local_mt"])
def test_nodes_see_the_flags_of_the_script_and_of_modules(run_script: Any, launcher: str) -> None:
    done = run_script(
        FLAGS_SCRIPT.replace("    FLAGS_PARSE\n", PROGRAMMATIC),
        launcher,
        "--count=5",
        "--fast",
        "--mode=test",
        "--color=BLUE",
        "--names=a,b",
        "--rate=0.25",
    )
    assert done.returncode == 0, done.stderr
    assert "main 5 True test ['a', 'b'] by hand" in done.stdout
    assert "rest True True as defined" in done.stdout
    assert "imported 0.25 7" in done.stdout
    assert "later 0.25 0.25 7" in done.stdout


@pytest.mark.usefixtures("more_flags")
def test_flags_nobody_parsed_are_parsed_at_launch(run_script: Any) -> None:
    done = run_script(FLAGS_SCRIPT.replace("    FLAGS_PARSE\n", ""), "--count=6", "--foreign=1")
    assert done.returncode == 0, done.stderr
    assert "main 6 False train ['x'] default" in done.stdout
    assert "imported 0.5 3" in done.stdout


LATE_FLAGS_SCRIPT = """
import sys
import launchpad_lite as lp

class Worker:
    def run(self):
        print("at first", "absl" in sys.modules)
        from absl import flags
        flags.DEFINE_integer("own", 3, "")
        print("then", flags.FLAGS.own, flags.FLAGS.lp_seed)

def main(argv):
    program = lp.Program("late")
    program.add_node(lp.PyClassNode(Worker), label="worker")
    lp.launch(program).wait()

if __name__ == "__main__":
    RUN
"""


def test_absl_has_the_flags_whenever_it_is_imported(run_script: Any) -> None:
    run_it = "from absl import app; app.run(main)"
    done = run_script(LATE_FLAGS_SCRIPT.replace("RUN", run_it), "--lp_seed=7")
    assert done.returncode == 0, done.stderr
    assert "at first True" in done.stdout
    assert "then 3 7" in done.stdout
    script = LATE_FLAGS_SCRIPT.replace("RUN", "main([])")
    for each in (script, script.replace("launch(program)", "launch(program, 'local_mt')")):
        done = run_script(each)
        assert done.returncode == 0, done.stderr
        assert "at first False" in done.stdout
        assert "then 3 None" in done.stdout


PROCESS_SCRIPT = """
import os
import launchpad_lite as lp

class Worker:
    def __init__(self, launcher):
        self.launcher = launcher

    def run(self):
        print("in a thread" if self.launcher == os.getpid() else "in a process")

if __name__ == "__main__":
    program = lp.Program("where")
    program.add_node(lp.PyClassNode(Worker, os.getpid()), label="worker")
    lp.launch(ARGUMENTS)
"""


@pytest.mark.parametrize(
    ("call", "arguments", "where"),
    [
        ("program", ["--launcher=local_mt"], "in a thread"),
        ("program", [], "in a process"),
        ("program, launch_type='local_mt'", ["--launcher=local_mp"], "in a thread"),
        ("[program], 'local_mt'", [], "in a thread"),
    ],
)
def test_the_launcher_is_chosen_in_code_or_on_the_command_line(
    run_script: Any, call: str, arguments: list[str], where: str
) -> None:
    done = run_script(PROCESS_SCRIPT.replace("ARGUMENTS", call), *arguments)
    assert done.returncode == 0, done.stderr
    assert where in done.stdout
    ignored = (
        "--launcher=local_mp has no effect: the script passes launcher='local_mt' to lp.launch\n"
    )
    both = arguments == ["--launcher=local_mp"]
    assert without_logs_line(done.stderr) == (ignored if both else "")


_OWN_LAUNCHER = {
    "absl": """
from absl import flags
flags.DEFINE_enum("launcher", "rocket", ["rocket", "sling"], "What starts it.")
flags.DEFINE_integer("hosts", 1, "")
own = lambda: flags.FLAGS
""",
    "argparse": """
import argparse
def own():
    parser = argparse.ArgumentParser()
    parser.add_argument("--launcher", choices=["rocket", "sling"])
    parser.add_argument("--hosts", type=int)
    return parser.parse_known_args()[0]
""",
}


@pytest.mark.parametrize("kind", _OWN_LAUNCHER)
def test_a_script_may_have_a_launcher_of_its_own(run_script: Any, kind: str) -> None:
    script = _OWN_LAUNCHER[kind] + (
        "import launchpad_lite as lp\n"
        "def main():\n"
        "    options = own()\n"
        "    program = lp.Program('own')\n"
        "    program.add_node(lp.PyNode(print, 'it ran'), label='a')\n"
        "    print(lp.plan(program))\n"
        "    print(options.launcher, options.hosts)\n"
        "if __name__ == '__main__':\n"
        "    main()\n"
    )
    done = run_script(script, "--launcher=sling", "--hosts=3")
    assert done.returncode == 0, done.stderr
    assert "own  (local_mp: " in done.stdout
    assert "sling 3\n" in done.stdout
    done = run_script(script, "--launcher=sling", "--lp_launcher=local_mt")
    assert "own  (local_mt: " in done.stdout, done.stderr


_PLANNING_SCRIPT = """
import launchpad_lite as lp

if __name__ == "__main__":
    program = lp.Program("asks")
    for label in "ab":
        program.add_node(lp.PyNode(print), label=label)
    print(lp.plan(program, requeue=False))
"""


def test_options_of_launchers_are_chosen_on_the_command_line(run_script: Any) -> None:
    options = [f"--lp_launcher_option={each}" for each in ("nodes=2", "time=9", "requeue")]
    done = run_script(_PLANNING_SCRIPT, "--launcher=slurm", *options)
    assert done.returncode == 0, done.stderr
    assert "note: Slurm is asked for 2 hosts" in done.stdout
    assert done.stderr == (
        "--lp_launcher_option=requeue has no effect: the script passes requeue=False to lp.launch\n"
    )


def test_launch_takes_exactly_one_program() -> None:
    one, two = lp.Program("one"), lp.Program("two")
    for wrong in ([], [one, two], None, "one"):
        with pytest.raises(lp.ProgramError, match=r"takes one lp\.Program"):
            lp.launch(wrong, "test_mt")  # type: ignore[arg-type]


SIGNAL_SCRIPT = """
import signal, sys, threading
import launchpad_lite as lp

class Handler:
    def __call__(self, signum, frame):
        print("called", signum, flush=True)

def in_thread(change):
    thread = threading.Thread(target=change, args=(handler,))
    thread.start()
    thread.join()

handler = Handler()
{body}
try:
    signal.raise_signal(signal.{signal})
except KeyboardInterrupt:
    print("interrupted", flush=True)
    raise
print("went on", flush=True)
"""


SIGNALS: dict[str, tuple[str, str, int, str]] = {
    "Ctrl-C calls the handler and interrupts": (
        "lp.register_stop_handler(handler)", "SIGINT", -2, "called 2 interrupted",
    ),
    "SIGTERM calls the handler and ends": (
        "lp.register_stop_handler(handler)", "SIGTERM", -15, "called 15",
    ),
    "unregistering restores": (
        ("lp.register_stop_handler(handler); lp.unregister_stop_handler(handler)\n"
        "assert signal.getsignal(signal.SIGINT) is signal.default_int_handler"),
        "SIGINT", -2, "interrupted",
    ),
    "unregistering in a thread": (
        "lp.register_stop_handler(handler); in_thread(lp.unregister_stop_handler)",
        "SIGINT", -2, "interrupted",
    ),
    "registering in a thread": (
        "in_thread(lp.register_stop_handler)", "SIGINT", -2, "interrupted",
    ),
    "own handlers stay": (
        ("signal.signal(signal.SIGINT, lambda *_: print('mine', flush=True))\n"
        "lp.register_stop_handler(handler)"),
        "SIGINT", 0, "mine went on",
    ),
    "a signal while registering": (
        ("class Racing:\n"
        "    def __call__(self): pass\n"
        "    def __eq__(self, other):\n"
        "        if other is not print:\n"
        "            return self is other\n"
        "        try:\n"
        "            signal.raise_signal(signal.SIGINT)\n"
        "        except KeyboardInterrupt:\n"
        "            print('in time', flush=True)\n"
        "lp.register_stop_handler(Racing()); lp.register_stop_handler(handler)\n"
        "lp.unregister_stop_handler(print)"),
        "SIGTERM", -15, "called 2 in time",
    ),
    "unregistering while a program runs": (
        ("program = lp.Program('p')\n"
        "program.add_node(lp.PyNode(lp.wait_for_stop), label='a')\n"
        "lp.register_stop_handler(print)\n"
        "running = lp.launch(program, 'local_mt')\n"
        "launched = signal.getsignal(signal.SIGINT)\n"
        "lp.unregister_stop_handler(print)\n"
        "assert signal.getsignal(signal.SIGINT) == launched, 'launch lost its handler'\n"
        "running.stop()"),
        "SIGINT", -2, "interrupted",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SIGNALS)
def test_signals_in_a_script_with_stop_handlers(run_script: Any, case: str) -> None:
    body, signal, code, output = SIGNALS[case]
    done = run_script(SIGNAL_SCRIPT.format(body=body, signal=signal))
    assert (done.returncode, done.stdout.split()) == (code, output.split()), done.stderr


@pytest.mark.parametrize("hiding", ["courier.py", "launchers/__init__.py"])
def test_files_that_hide_our_packages_are_named(
    run_script: Any, tmp_path: Path, hiding: str
) -> None:
    theirs = tmp_path / hiding
    theirs.parent.mkdir(exist_ok=True)
    theirs.write_text("raise SystemExit('their code ran')\n")
    done = run_script("import launchpad_lite")
    assert done.returncode == 1
    ours = Path(lp.__file__).parents[1] / hiding.partition("/")[0].removesuffix(".py")
    error = done.stderr.splitlines()[-1]
    assert error.startswith(f"ImportError: {theirs} hides the package")
    assert f"at {ours}: Python finds yours first. Rename yours" in error


@pytest.mark.parametrize(
    ("package", "others", "last"),
    [
        ("courier", ["courier"], "ours"),
        ("courier", ["courier"], "theirs"),
        ("courier", ["dm-launchpad", "dm-launchpad-nightly"], "theirs"),
        ("courier", [], "ours"),  # a module of the user's own
        ("courier", [], "uninstalled"),
        ("launchers", ["fleet"], "ours"),
        ("launchers", ["fleet"], "theirs"),
    ],
)
def test_packages_of_the_same_name_in_one_folder_are_named(
    tmp_path: Path, package: str, others: list[str], last: str
) -> None:
    root = Path(lp.__file__).parents[1]
    for name in ("courier", "launchpad_lite", "launchers"):
        (tmp_path / name).mkdir()
        for path in (root / name).iterdir():
            (tmp_path / name / path.name).symlink_to(path)
    mixed = tmp_path / package
    (mixed / "imap_client.py").touch()
    if last != "ours":
        (mixed / "__init__.py").unlink()
    if last == "theirs":
        (mixed / "__init__.py").write_text("IS_THEIRS = True")
    (tmp_path / "interrupted.dist-info").mkdir()
    for other in others:
        known = tmp_path / f"{other.replace('-', '_')}-1.2.dist-info"
        known.mkdir()
        (known / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {other}\nVersion: 1.2\n")
        (known / "RECORD").write_text(f"{package}/imap_client.py,,\n")
    imports = f"""
for name in ({package!r}, "launchpad_lite"):
    try:
        __import__(name)
    except ImportError as error:
        print(error)
"""
    done = subprocess.run(
        [sys.executable, *(["-S"] if last != "ours" else []), "-c", imports],
        cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True,
    )  # fmt: skip
    errors = done.stdout.splitlines()
    assert done.stderr == ""
    assert len(errors) == {"ours": 2 * bool(others), "theirs": 1, "uninstalled": 1}[last]
    for error in errors:
        assert "pip install --force-reinstall --no-deps launchpad-lite" in error
        if others:
            theirs = " and ".join(f"{other} 1.2 at {mixed}" for other in others)
            assert error.startswith(f"launchpad-lite at {root / package} and {theirs} have")
            assert f"run: pip uninstall --yes {' '.join(others)}; pip install" in error
        else:
            assert error.startswith(f"files of launchpad-lite in {mixed} were replaced")


#: The end of a script that launches a node `a` of its function `work`.
_LAUNCH = """
    program = lp.Program("small")
    program.add_node(lp.PyNode(work), label="a")
    lp.launch(program).wait()
"""
_LOGGING = """
import logging
import launchpad_lite as lp

def work():
    logging.info("of the root")
    logging.getLogger("deep.er").debug("of a logger with a level")
    logging.getLogger("other").debug("of one without")

if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(levelname)s|%(message)s")
    logging.getLogger("deep").setLevel(logging.DEBUG)
"""


def test_workers_log_as_the_script_is_set_up_to(run_script: Any) -> None:
    done = run_script(_LOGGING + _LAUNCH)
    assert (done.returncode, without_logs_line(done.stderr)) == (0, "")
    assert done.stdout.splitlines() == [
        "[a[0]] INFO|of the root",
        "[a[0]] DEBUG|of a logger with a level",
    ]


_LAZY = """
import inspect
from typing import TYPE_CHECKING
import launchpad_lite as lp

if TYPE_CHECKING:
    from nowhere import Thing

class Node:
    field: Thing | None = None

    def __init__(self, thing: Thing | None = None) -> None:
        self.thing = thing

    def give(self, thing: Thing | None = None, count: int = 3) -> Thing:
        return count

def work(node: Thing, size: int):
    def inner(thing: Thing) -> Thing:
        return thing
    signature = inspect.signature(node.give)
    print(inner(node.give()), size, len(signature.parameters), "Thing" in str(signature))

def make(size: int = 1, thing: Thing | None = None) -> lp.Program:
    program = lp.Program("lazy")
    node = program.add_node(lp.CourierNode(Node), label="node")
    program.add_node(lp.PyNode(work, node, size), label="work")
    return program

if __name__ == "__main__":
    lp.main(make)
"""


def test_annotations_may_name_what_only_type_checkers_import(run_script: Any) -> None:
    first = "" if sys.version_info >= (3, 14) else "from __future__ import annotations\n"
    done = run_script(first + _LAZY, "--size=2")
    assert (done.returncode, done.stdout) == (0, "[work[0]] 3 2 2 True\n")


_LOGGING_OF_ABSL = """
from absl import app, logging
import launchpad_lite as lp

def work():
    logging.info("of the node")
    logging.debug("not shown")

def main(_):
    program = lp.Program("logging")
    program.add_node(lp.PyNode(work), label="a")
    lp.launch(program).wait()

if __name__ == "__main__":
    app.run(main)
"""


def test_lines_of_absl_keep_their_time_and_place_in_workers(run_script: Any) -> None:
    done = run_script(_LOGGING_OF_ABSL)
    (line,) = done.stdout.splitlines()
    assert re.fullmatch(r"\[a\[0\]\] I\d{4} [\d:.]+ \d+ script.py:6\] of the node", line)


BATCHING_SCRIPT = """
import launchpad_lite as lp

def make_class():
    class Base:
        def name(self):
            return "base"

    class Inner(Base):
        @lp.batched_handler(batch_size=1)
        def act(self, values):
            name = super().name()
            return [f"{name}{value}" for value in values]

    return Inner

class Model:
    @lp.batched_handler(batch_size=1)
    def act(self, values):
        return [2 * value for value in values]

class User:
    def __init__(self, model, inner):
        self.model, self.inner = model, inner

    def run(self):
        print(self.model.act(21), self.inner.act(1))

if __name__ == "__main__":
    program = lp.Program("batches")
    model = program.add_node(lp.CourierNode(Model), label="model")
    inner = program.add_node(lp.CourierNode(make_class()), label="inner")
    program.add_node(lp.PyClassNode(User, model, inner), label="user")
    lp.launch(program)
"""


def test_classes_of_the_script_decorate_methods_with_batched_handler(run_script: Any) -> None:
    done = run_script(BATCHING_SCRIPT, "--launcher=local_mp")
    assert done.returncode == 0, done.stderr
    assert "42 base1" in done.stdout


_FAILING_AFTER_LAUNCHES = """
import sys
import launchpad_lite as lp

def launch(seconds):
    program = lp.Program("goes_on")
    program.add_node(lp.PyNode(lp.wait_for_stop, seconds), label="work")
    return lp.launch(program, "local_mt")

if __name__ == "__main__":
    launch(0.0).wait()
    before = sys.excepthook
    HOOK
    running = launch(1.0)
    WAIT
    raise KeyError("of the script")
"""
_CALLS_OURS = "sys.excepthook = lambda *error: before(*error)"
_CALLS_NONE = "sys.excepthook = lambda *error: print('other hook', file=sys.stderr)"
_WAITS = "launchpad: the script failed; waiting for 'goes_on'. Ctrl-C stops it\n"


@pytest.mark.parametrize(
    ("hook", "wait", "shown", "told"),
    [
        ("", "", "KeyError: 'of the script'", _WAITS),
        (_CALLS_OURS, "", "KeyError: 'of the script'", _WAITS),
        (_CALLS_NONE, "", "other hook", _WAITS),
        (_CALLS_OURS, "running.wait()", "KeyError: 'of the script'", ""),
    ],
    ids=["no hook", "a hook that calls ours", "a hook that calls none", "nothing to wait for"],
)
def test_a_script_that_fails_shows_its_error_once_and_that_it_waits_whatever_hooks_others_have(
    run_script: Any, hook: str, wait: str, shown: str, told: str
) -> None:
    done = run_script(_FAILING_AFTER_LAUNCHES.replace("HOOK", hook).replace("WAIT", wait))
    traceback, after = done.stderr.split(f"{shown}\n")
    assert after == told
    assert ("Traceback" in traceback) == (hook != _CALLS_NONE)
    assert "RecursionError" not in traceback
    assert done.returncode == 1


_BY_NAME = """
import copy, functools, multiprocessing, pickle, sys
import launchpad_lite as lp
from launchpad_lite import engines, search

class Model:
    class Settings:
        pass

    def __init__(self, size):
        self.size = size
        self.settings = Model.Settings()

class Outer:
    class Inner:
        pass

def square(x):
    return x * x

@functools.cache
def doubled(x):
    return 2 * x

def use(what):
    model, inner, function, cached = what
    for each in what:
        assert pickle.loads(pickle.dumps(each)).__class__ is each.__class__, each
    assert copy.deepcopy(model).size == 3
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.map(function, [model.size]) + pool.map(cached, [model.size])

class Server:
    def call(self, user, what):
        return user(what)

def by_call(what):
    program = lp.Program("by_call")
    handle = program.add_node(lp.CourierNode(Server), label="server")
    running = lp.launch(program, "test_mp")
    try:
        print([handle.dereference().call(use, what) for _ in range(2)][0])
    finally:
        running.stop()

def by_executor(what):
    with search.Executor(1) as executor:
        print([executor.submit(use, what).result() for _ in range(2)][0])

def by_map_reduce(what):
    with engines.MapReduce(1, progress=False) as mr:
        print(mr.load([what]).map(use).collect()[0])

if __name__ == "__main__":
    globals()[sys.argv[1]]([Model(3), Outer.Inner(), square, doubled])
"""


@pytest.mark.parametrize("way", ["by_call", "by_executor", "by_map_reduce"])
def test_what_the_script_defines_is_found_by_name_wherever_it_arrives(
    run_script: Any, way: str
) -> None:
    done = run_script(_BY_NAME, way)
    assert "[9, 6]" in done.stdout, done.stderr


_SUBMODULES = """
import sys, types
import launchpad_lite as lp
import pack, pack.one, pack.two, pack.three, pack.four, pack.five, pack.six.deep

def at_closure():
    import pack as package
    return lambda: package.five.value

FIVE = at_closure()

class Worker:
    def __init__(self):
        self.one = (lambda: pack.one.value)()

    def run(self):
        class Inner:
            two = pack.two.value

        def function():
            return [pack.three.value for _ in range(2)]

        def importing():
            import pack
            return (lambda: pack.four.value)()

        print(self.one, Inner.two, function(), importing(), FIVE(), pack.six.deep.value)

class MadeByHand:
    def run(self):
        print((lambda: pack.hand.value)())

if __name__ == "__main__":
    program = lp.Program("submodules")
    program.add_node(lp.PyClassNode(Worker), label="worker")
    lp.launch(program).wait()
    sys.modules["pack.hand"] = pack.hand = types.ModuleType("pack.hand")
    program = lp.Program("by_hand")
    program.add_node(lp.PyClassNode(MadeByHand), label="worker")
    lp.plan(program)
"""


def test_nodes_load_the_submodules_that_nested_code_names(run_script: Any, tmp_path: Path) -> None:
    (tmp_path / "pack" / "six").mkdir(parents=True)
    for number, name in enumerate(["one", "two", "three", "four", "five", "six/deep"], 1):
        (tmp_path / "pack" / f"{name}.py").write_text(f"value = {number}")
    for package in ("pack", "pack/six"):
        (tmp_path / package / "__init__.py").touch()
    done = run_script(_SUBMODULES)
    assert "[worker[0]] 1 2 [3, 3] 4 5 6" in done.stdout, done.stderr
    assert "PicklingError: its code names pack.hand, a module that was made by" in done.stderr


_WARNINGS = """
import warnings
import launchpad_lite as lp

class Mine(UserWarning):
    pass

class MineToo(Mine):
    pass

def work():
    warnings.warn("quiet", UserWarning)
    for kind in (Mine, MineToo):
        try:
            warnings.warn("loud", kind)
        except Mine as error:
            print("raised", type(error).__name__)

if __name__ == "__main__":
    warnings.filterwarnings("error", category=Mine)
    warnings.filterwarnings("ignore", message="qui", category=UserWarning)
"""


def test_workers_filter_warnings_as_the_script_does(run_script: Any) -> None:
    done = run_script(_WARNINGS + _LAUNCH)
    assert (done.returncode, without_logs_line(done.stderr)) == (0, "")
    assert done.stdout.splitlines() == ["[a[0]] raised Mine", "[a[0]] raised MineToo"]


_SET_UP = """
import asyncio, logging, os, warnings
import launchpad_lite as lp

class Policy(asyncio.DefaultEventLoopPolicy):
    pass

@lp.set_up
def first():
    raise SystemError("is replaced")

@lp.set_up
def first():
    import small
    small.order.append("first")
    logging.getLogger("deep").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")

lp.set_up(lambda: asyncio.set_event_loop_policy(Policy()))
lp.set_up(lambda: __import__("small").order.append("last"))

class Worker:
    def __init__(self):
        import small
        self.order = small.order

    async def run(self):
        print(type(asyncio.get_event_loop_policy()).__name__, *self.order)
        logging.getLogger("deep").warning("is not shown")
        warnings.warn("nor is this")

if __name__ == "__main__":
    logging.getLogger("deep").setLevel(logging.INFO)
    program = lp.Program("set_up")
    program.add_node(lp.PyClassNode(Worker), label="a")
    lp.launch(program).wait()
    BAD
"""
_BAD_SET_UP = """
    @lp.set_up
    def bad():
        raise ValueError("of mine")

    work = print
"""


@pytest.mark.parametrize("launcher", ["local_mp", "local_mt"])
def test_functions_that_set_up_a_process_run_first_in_it(
    run_script: Any, tmp_path: Path, launcher: str
) -> None:
    (tmp_path / "small.py").write_text("order = []\n")
    done = run_script(_SET_UP.replace("BAD", _BAD_SET_UP + _LAUNCH), f"--launcher={launcher}")
    assert done.stdout.splitlines()[0].split("] ")[-1] == "Policy first last", done.stderr
    assert "is not shown" not in done.stdout + done.stderr
    assert "nor is this" not in done.stdout + done.stderr
    assert "lp.set_up(bad): ValueError: of mine" in done.stderr


@pytest.mark.parametrize("wrong", [3, asyncio.sleep])
def test_what_cannot_set_up_a_process_is_refused_at_once(wrong: Any) -> None:
    with pytest.raises(TypeError, match="set_up takes a function that is not async"):
        lp.set_up(wrong)


#: As coverage.py, which its own .pth file starts in each interpreter.
_COVERAGE = """
import atexit

class Coverage:
    @classmethod
    def current(cls):
        return cls()

    def save(self):
        print("saved")

atexit.register(Coverage.current().save)
"""


def test_coverage_counts_what_nodes_run(
    run_script: Any, tmp_path: Path, environment: dict[str, str]
) -> None:
    site = tmp_path / "site"
    site.mkdir()
    (site / "coverage.py").write_text(_COVERAGE)
    (site / "sitecustomize.py").write_text("import coverage\n")
    environment["PYTHONPATH"] += f":{site}"
    source = "import launchpad_lite as lp\ndef work(): print('ran')\nif __name__ == '__main__':"
    done = run_script(source + _LAUNCH)
    assert done.stdout.splitlines() == ["[a[0]] ran", "[a[0]] saved", "saved"], done.stderr


def test_a_script_that_gevent_has_patched_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    patched = unittest.mock.Mock(saved={"socket": {}}, __spec__=None)
    monkeypatch.setitem(sys.modules, "gevent.monkey", patched)
    program = lp.Program("patched")
    program.add_node(lp.PyNode(print), label="a")
    with pytest.raises(lp.LaunchError, match="gevent has patched the standard library"):
        lp.launch(program, "test_mp")


def test_a_clock_that_stands_still_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    program = lp.Program("frozen")
    program.add_node(lp.PyNode(print), label="a")
    client: Any = courier.Client("127.0.0.1:1")
    with monkeypatch.context() as patch:
        patch.setattr("time.monotonic", lambda: 1.0)
        with pytest.raises(RuntimeError, match=rf"{__name__} has stopped time\.monotonic"):
            lp.launch(program, "test_mp")
        with pytest.raises(RuntimeError, match=r"freeze_time\(\.\.\., ignore="):
            client.ping()
