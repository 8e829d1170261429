"""Plans: mistakes are told together, handles are found wherever they are, sharing, pictures."""

import collections
import copy
import dataclasses
import functools
import os
import re
import shutil
import threading
import time
import unittest.mock
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import pytest

import launchpad_lite as lp
from launchpad_lite.nodes.base import Handle, PlanContext, Task
from launchpad_lite.nodes.python import FunctionWork

T = TypeVar("T")


class Service:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def save(self, folder: Path) -> None: ...

    def restore(self, folder: Path) -> None: ...


def ignore(*args: Any, **kwargs: Any) -> None: ...


class Box:
    def __init__(self, content: Any = None) -> None:
        self.content = content

    def get(self) -> Any:
        return self.content


class Client:
    def __init__(self, key: str) -> None:
        self.key = key


class ProbeHandle(Handle[Client]):
    """Dereferences without a program."""

    def dereference(self) -> Client:
        return Client(self.node_key)


class Several(lp.Node[Any]):
    """A node that may be any number of executables."""

    def __init__(self, count: int = 1) -> None:
        super().__init__()
        self.count = count

    def create_handle(self) -> ProbeHandle:
        return ProbeHandle(self)

    def to_executables(self, context: PlanContext) -> Sequence[Task]:
        return [Task(FunctionWork(print, (), {}), (), f"Part({n})") for n in range(self.count)]


@dataclasses.dataclass(frozen=True)
class Frozen:
    content: Any


class Slotted:
    __slots__ = ("__private", "content")

    def __init__(self, content: Any, private: Any = None) -> None:
        self.content = content
        self.__private = private

    @property
    def private(self) -> Any:
        return self.__private


class Pair(NamedTuple):
    left: Any
    right: Any


def server(program: lp.Program, label: str = "server") -> lp.CourierHandle[Service]:
    node = lp.CourierNode(Service)
    program.add_node(node, label=label)
    return node.create_handle()


def mistakes_of(program: lp.Program, launcher: str = "test_mp", **options: Any) -> list[str]:
    with pytest.raises(lp.ProgramError) as wrong:
        lp.plan(program, launcher, **options)
    assert all(mistake in str(wrong.value) for mistake in wrong.value.mistakes)
    return list(wrong.value.mistakes)


# Mistakes


def test_an_empty_program_is_a_mistake() -> None:
    (mistake,) = mistakes_of(lp.Program("empty"))
    assert "no nodes" in mistake
    assert "add_node" in mistake


def lock_in_closure() -> Callable[[], object]:
    the_lock = threading.Lock()
    return lambda: the_lock


def in_a_cycle(thing: object) -> Box:
    box = Box()
    box.content = [box, thing]
    return box


@pytest.mark.parametrize(
    ("thing", "path"),
    [
        (threading.Lock(), "argument 0"),
        ({"a": [1, {"b": threading.Lock()}]}, "argument 0['a'][1]['b']"),
        (Box(Box(threading.Lock())), "argument 0.content.content"),
        (Frozen((1, threading.Lock())), "argument 0.content[1]"),
        (Slotted(threading.Lock()), "argument 0.content"),
        (lock_in_closure(), "argument 0 closure variable 'the_lock'"),
        (functools.partial(print, end=threading.Lock()), "argument 0.keywords['end']"),
        (Box(threading.Lock()).get, "argument 0.__self__.content"),
        (in_a_cycle(threading.Lock()), "argument 0.content[1]"),
        (lp.Deferred(Service, 1, [threading.Lock()]), "argument 0.args[1][0]"),
        (lp.Deferred(Service, key=threading.Lock()), "argument 0.kwargs['key']"),
        (
            lp.Deferred(Service, lp.Deferred(Service, threading.Lock())),
            "argument 0.args[0].args[0]",
        ),
    ],
)
def test_what_cannot_be_pickled_is_named_with_its_path(thing: object, path: str) -> None:
    program = lp.Program("locks")
    with program.group("worker"):
        program.add_node(lp.CourierNode(Service))
        program.add_node(lp.CourierNode(Service, thing))
    (mistake,) = mistakes_of(program)
    assert mistake.startswith(f"worker[1] CourierNode(Service): {path} (a lock) cannot be pickled")


def test_all_mistakes_are_told_together_each_with_node_and_argument() -> None:
    program = lp.Program("wrong")
    lost = lp.CourierNode(Service).create_handle()
    silent = program.add_node(lp.PyNode(print), label="silent")
    node = lp.CourierNode(Service)
    program.add_node(node, label="server")
    with program.group("caller"):
        program.add_node(lp.CourierNode(Service, threading.Lock(), b={"c": threading.Lock()}))
        program.add_node(lp.CourierNode(Service, threading.Lock(), lost))
        program.add_node(lp.CourierNode(Service, [1, lost]))
        program.add_node(lp.PyClassNode(Service, servers={"x": Box(silent)}))
        program.add_node(lp.PyNode(print, lp.Deferred(Service, node)))
    found = mistakes_of(program, resources={"nobody": {}, "caller": {"cpu": -1}})
    expected = [
        r"unknown group 'nobody'; the groups are: silent, server, caller",
        r"group 'caller': cpu cannot be -1",
        r"caller\[0\] CourierNode\(Service\): argument 0 .*lock.*pickled",
        r"caller\[0\] CourierNode\(Service\): argument 'b'\['c'\] .*lock.*pickled",
        r"caller\[1\] CourierNode\(Service\): argument 0 .*lock.*pickled",
        r"caller\[1\] CourierNode\(Service\): argument 1 .*never added",
        r"caller\[2\] CourierNode\(Service\): argument 0\[1\] .*never added",
        (
            r"caller\[3\] PyClassNode\(Service\): argument 'servers'\['x'\]\.content .*silent\[0\].*"
            r"PyNode\(print\) serves nothing"
        ),
        r"caller\[4\] PyNode\(print\): argument 0\.args\[0\] .*CourierNode.*node where a handle should be",
    ]
    assert len(found) == len(expected)
    for mistake, pattern in zip(found, expected, strict=True):
        assert re.search(pattern, mistake), (pattern, mistake)


class Builder:
    """Holds the program that its methods are constructors of, as those of Mava do."""

    def __init__(self) -> None:
        self.program = lp.Program("built")
        self.node = lp.CourierNode(self.make)
        self.size = 3

    def make(self, *_: Any) -> Box:
        return Box(self)

    def __call__(self) -> Box:
        return Box(self)


#: From a builder to a node that it makes, with a constructor that holds the builder.
BUILT: dict[str, Callable[[Builder], lp.Node[Any]]] = {
    "a method": lambda builder: builder.node,
    "a partial method": lambda builder: lp.PyClassNode(functools.partial(builder.make, 1)),
    "a function": lambda builder: lp.CourierNode(lambda: builder.make(builder.node)),
    "an object": lp.PyNode,
    "an argument that is called": lambda builder: lp.CourierNode(ignore, builder.make),
    "a colocation": lambda builder: lp.ColocationNode([builder.node]),
}


@pytest.mark.parametrize("launcher", ["test_mp", "local_mt"])
@pytest.mark.parametrize("built", BUILT)
def test_a_constructor_may_hold_its_program_and_nodes(built: str, launcher: str) -> None:
    builder = Builder()
    builder.program.add_node(BUILT[built](builder), label="built")
    lp.plan(builder.program, launcher)


@pytest.mark.parametrize("launcher", ["test_mp", "local_mt"])
def test_a_program_or_node_that_is_used_in_a_process_says_that_it_is_not_there(
    launcher: str,
) -> None:
    builder = Builder()
    builder.program.add_node(builder.node, label="built")
    (executable,) = lp.plan(builder.program, launcher).executables
    there = executable.work.thaw().constructor().get()  # type: ignore[attr-defined]
    assert there.size == 3
    for thing, text in (
        (there.program, r"program 'built' has no 'add_node' here: programs and their nodes stay"),
        (there.node, r"CourierNode\(make\) has no 'add_node' here: "),
        (copy.deepcopy(there).node, r"CourierNode\(make\) has no 'add_node' here: "),
    ):
        with pytest.raises(AttributeError, match=text):
            thing.add_node(None)


#: What may hold a handle, and where it is in that.
HOLDERS: dict[str, tuple[Callable[[Any], lp.Node[Any]], str]] = {
    "a node": (lambda handle: lp.CourierNode(Service, [handle]), "argument 0[0]"),
    "a cacher": (lambda handle: lp.CacherNode(handle, 1, 2), ""),
    "a pool": (lambda handle: lp.CourierNode(Service, lp.Pool([handle])), "argument 0._handles[0]"),
    "a command": (lambda handle: lp.CommandNode(["ls"], uses={"x": handle}), "uses['x']"),
    "a deferred argument": (
        lambda handle: lp.CourierNode(Service, lp.Deferred(Service, handle)), "argument 0.args[0]",
    ),
    "a colocation": (lambda handle: lp.ColocationNode([lp.PyNode(ignore, handle)]), "argument 0"),
}  # fmt: skip


@pytest.mark.parametrize("holder", HOLDERS)
def test_a_handle_to_what_is_missing_or_serves_nothing_is_a_mistake(holder: str) -> None:
    hold, place = HOLDERS[holder]
    program, other = lp.Program("lost"), lp.Program("other")
    elsewhere = server(other)
    program.add_node(lp.PyNode(print), label="silent")
    for handle in (lp.CourierNode(Service).create_handle(), elsewhere):
        program.add_node(hold(handle), label="holder")
    for handle in (program.declare("nowhere", 1), program.declare("silent")):
        program.add_node(hold(handle), label="holder")
    never, foreign, declared, silent = found = mistakes_of(program, "test_mt")
    assert all(each.startswith(f"holder[{number}] ") for number, each in enumerate(found))
    assert f"{place} is a handle to a node that was never added" in never
    assert "a node of another program, 'other'" in foreign
    assert f"{place} is a handle to nowhere[1], which was declared" in declared
    assert "silent[0], but a PyNode(print) serves nothing" in silent


def test_what_is_promised_goes_to_single_nodes_before_groups_before_all() -> None:
    program = lp.Program("promises")
    for _ in range(2):
        server(program, "a")
    server(program, "b")
    a0, a1, b = lp.plan(
        program,
        "test_mt",
        {"a": {"cpu": 1}, "a[1]": {"cpu": 2, "ram": np.float64(1.5), "gpu": np.int64(1)}},
        restart={"a": "always", "a[1]": lp.RestartPolicy(max_restarts=7)},
        liveness=lp.Liveness(heartbeat_s=3),
        checkpoints={"b": "runs/1"},
    ).executables
    assert a0.resources == lp.Resources(cpu=1)
    assert a1.resources == lp.Resources(cpu=2, ram_gib=1.5, gpu=1)
    assert b.resources == lp.Resources()
    assert [str(each.restart.when) for each in (a0, a1, b)] == [
        "RestartWhen.ALWAYS",
        "RestartWhen.ON_FAILURE",
        "RestartWhen.NEVER",
    ]
    assert a1.restart.max_restarts == 7
    assert {each.liveness for each in (a0, a1, b)} == {lp.Liveness(heartbeat_s=3)}
    assert a0.checkpoints is None
    assert b.checkpoints is not None
    assert b.checkpoints.folder == Path("runs/1/b/0").absolute()
    assert b.checkpoints.required


def test_what_is_promised_is_shown_in_the_plan() -> None:
    program = lp.Program("promises")
    for _ in range(2):
        server(program, "a")
    server(program, "b")
    text = str(
        lp.plan(
            program,
            "test_mt",
            restart={"a[1]": "on_failure", "b": "always"},
            liveness={"b": {"health_s": 5}},
            checkpoints=lp.Checkpoints("/runs", period_s=60),
        )
    )
    assert (
        "b  1 node, each restart=always, at most 3 in 600 s; health_s=5; checkpoints every" in text
    )
    assert re.search(
        r"a\[0\]  CourierNode\(Service\)  checkpoints every 60 s in /runs$", text, re.MULTILINE
    )
    assert re.search(
        r"a\[1\]  CourierNode\(Service\)  restart=on_failure, at most 3 .*/runs$",
        text,
        re.MULTILINE,
    )


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"resources": {"a": {"cpu": -1}}}, "group 'a': cpu cannot be -1"),
        ({"resources": {"a": {"cpu": float("nan")}}}, "cpu cannot be nan"),
        ({"resources": {"a": {"cpu": "2"}}}, "cpu is a number, not '2'"),
        ({"resources": {"a": {"gpu": True}}}, "gpu is a number"),
        ({"resources": {"a": {"gpu": 1.5}}}, "whole number, or below 1 to share one"),
        ({"resources": {"a": {"tpu": 1}}}, "unknown resource 'tpu'; known are cpu, ram_gib, gpu"),
        ({"resources": {"a": {1: 1, "tpu": 1}}}, "unknown resource"),
        ({"resources": {"a": {"ram": 1, "ram_gib": 2}}}, "mean the same"),
        ({"resources": {"a": 3}}, "group 'a': expected lp.Resources or a dict"),
        ({"resources": ["a"]}, "dict"),
        ({"restart": "sometimes"}, "restart: a restart policy is one of 'never', 'on_failure'"),
        ({"restart": {"a[0]": {"max": 3}}}, "restart of node 'a[0]': unknown setting 'max'"),
        ({"restart": {"b": "always"}}, "restart for an unknown group 'b'; the groups are: a"),
        ({"restart": {"a[1]": "always"}}, "restart for an unknown node 'a[1]'"),
        ({"liveness": {"a": {"health_s": 0}}}, "liveness of group 'a': health_s cannot be 0"),
        ({"liveness": 3.0}, "liveness: expected lp.Liveness"),
        ({"checkpoints": {"a": ""}}, "checkpoints of group 'a'"),
        ({"seed": -1}, "seed: it is a whole number from 0 on, not -1"),
        ({"seed": True}, "seed: it is a whole number from 0 on, not True"),
        ({"seed": "7"}, "seed: it is a whole number from 0 on, not '7'"),
    ],
)
def test_wrong_settings_are_mistakes(settings: dict[str, Any], words: str) -> None:
    program = lp.Program("settings")
    server(program, "a")
    (mistake,) = mistakes_of(program, **settings)
    assert words in mistake


# Handles, wherever they are


def nested(content: Any, depth: int = 100) -> Any:
    for _ in range(depth):
        content = [{"x": (content,)}]
    return content


def unnest(value: Any, depth: int = 100) -> Any:
    for _ in range(depth):
        value = value[0]["x"][0]
    return value


def object_array(content: Any) -> Any:
    array = np.empty(2, dtype=object)
    array[1] = content
    return array


_hidden: Any = None


def in_a_global(content: Any) -> Any:
    global _hidden
    _hidden = content
    return lambda: [_hidden for _ in "a"]


PLACES: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "itself": (lambda x: x, lambda v: v),
    "list": (lambda x: [0, x], lambda v: v[1]),
    "tuple": (lambda x: (x,), lambda v: v[0]),
    "dict value": (lambda x: {"a": x}, lambda v: v["a"]),
    "dict key": (lambda x: {x: 1}, lambda v: next(iter(v))),
    "default dict": (lambda x: collections.defaultdict(list, a=x), lambda v: v["a"]),
    "deque": (lambda x: collections.deque([x]), lambda v: v[0]),
    "set": (lambda x: {x}, lambda v: next(iter(v))),
    "namedtuple": (lambda x: Pair(1, x), lambda v: v.right),
    "frozen dataclass": (Frozen, lambda v: v.content),
    "slots": (Slotted, lambda v: v.content),
    "private slot": (lambda x: Slotted(None, x), lambda v: v.private),
    "attribute": (Box, lambda v: v.content),
    "partial argument": (lambda x: functools.partial(dict, [], a=x), lambda v: v()["a"]),
    "closure": (lambda x: lambda: x, lambda v: v()),
    "default argument": (lambda x: lambda y=x: y, lambda v: v()),
    "keyword default": (lambda x: lambda *, y=x: y, lambda v: v()),
    "bound method": (lambda x: Box(x).get, lambda v: v()),
    "object array": (object_array, lambda v: v[1]),
    "global of a local function": (in_a_global, lambda v: v()[0]),
    "deep": (nested, unnest),
}


def probe(program: lp.Program) -> ProbeHandle:
    node = Several()
    program.add_node(node, label="probe")
    return node.create_handle()


def thawed(program: lp.Program, launcher: str, function: Any, *args: Any, **kwargs: Any) -> Any:
    """Returns the work of a node as its worker has it."""
    program.add_node(lp.PyNode(function, *args, **kwargs), label="worker")
    return lp.plan(program, launcher).executables[-1].work.thaw()


SHARED_AND_COPIED = pytest.mark.parametrize("launcher", ["local_mt", "test_mp"])


@SHARED_AND_COPIED
@pytest.mark.parametrize("place", PLACES)
def test_a_handle_becomes_an_edge_and_a_client_wherever_it_is(place: str, launcher: str) -> None:
    put, take = PLACES[place]
    program = lp.Program("handles")
    handle = probe(program)
    program.add_node(lp.PyNode(print, put(handle)), label="worker")
    worker = lp.plan(program, launcher).executables[-1]
    assert worker.calls == ("probe[0]",)
    work: Any = worker.work.thaw()
    client = take(work.args[0])
    assert isinstance(client, Client)
    assert client.key == handle.node_key


@SHARED_AND_COPIED
def test_one_handle_in_two_places_is_one_client(launcher: str) -> None:
    program = lp.Program("handles")
    handle = probe(program)
    work = thawed(program, launcher, ignore, handle, [handle], a=handle)
    assert work.args[0] is work.args[1][0] is work.kwargs["a"]


# Sharing


class Lazy(collections.UserDict[str, int]):
    """Has side effects when it is looked at."""

    def __iter__(self) -> Any:
        raise AssertionError("planning runs no code of shared objects")

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"planning asked for {name}")


def test_threads_share_what_holds_no_handle_and_planning_does_not_run_its_code() -> None:
    class Local(Box):
        pass

    program = lp.Program("shared")
    handle = probe(program)
    results: list[int] = []
    event, mock = threading.Event(), unittest.mock.MagicMock()
    inner, lazy = {"event": event}, Lazy.__new__(Lazy)
    args = (results, [handle, inner, results], Box(threading.Lock()), lazy, mock.child, mock)
    work = thawed(program, "local_mt", ignore, *args, Local(handle), event=event)
    assert work.function is ignore
    for index in (0, 2, 3, 4, 5):
        assert work.args[index] is args[index]
    assert work.args[1] is not args[1]
    assert work.args[1][1] is inner
    assert work.args[1][2] is results
    assert type(work.args[6]) is Local
    assert work.kwargs["event"] is event
    assert isinstance(args[1][0], ProbeHandle)  # the user's own list is as it was


@SHARED_AND_COPIED
def test_objects_in_cycles_are_fine(launcher: str) -> None:
    first, second = Box(), Box()
    first.content, second.content = second, first
    loop: list[Any] = []
    loop.append(loop)
    program = lp.Program("cycles")
    with_handle = Box()
    with_handle.content = [with_handle, probe(program)]
    work = thawed(program, launcher, print, first, loop, with_handle)
    assert work.args[0].content.content is work.args[0]
    assert work.args[1][0] is work.args[1]
    assert work.args[2].content[0] is work.args[2]
    assert isinstance(work.args[2].content[1], Client)


@SHARED_AND_COPIED
def test_big_programs_are_planned_in_reasonable_time(launcher: str) -> None:
    program = lp.Program("big")
    config = {
        "table": {f"key {index}": float(index) for index in range(20_000)},
        "blob": b"x" * 2**19,
        "array": np.zeros(2**15),
    }
    with program.group("server"):
        servers = [program.add_node(lp.CourierNode(Service, config)) for _ in range(60)]
    with program.group("caller"):
        for _ in range(60):
            program.add_node(lp.CourierNode(Service, servers, config=config))
    start = time.process_time()
    plan = lp.plan(program, launcher)
    assert time.process_time() - start < 5.0
    assert len(plan.executables) == 120
    assert len(plan.executables[-1].calls) == 60


# Pictures


def test_edges_are_right_where_nodes_have_several_executables_or_none() -> None:
    program = lp.Program("several")
    nodes = [Several(0), Several(2), Several(1)]
    caller = lp.CourierNode(Service, *(node.create_handle() for node in nodes))
    with program.group("group"):
        for node in nodes:
            program.add_node(node)
    program.add_node(caller, label="caller")
    plan = lp.plan(program, "test_mp")
    names = [each.name for each in plan.executables]
    assert names == ["group[0]", "group[1]", "group[2]", "caller[0]"]
    assert plan.executables[-1].calls == ("group[0]", "group[2]")
    assert plan.executables[-1].services == ("group[0]",)
    assert lp.render_mermaid(plan).splitlines()[-3:] == [
        "  node3 --> node0",
        "  node3 --> node2",
        "  node3 --> service0",
    ]


def test_a_mistake_of_a_node_class_becomes_a_mistake_of_the_program() -> None:
    class Incomplete(Several):
        def to_executables(self, context: PlanContext) -> Sequence[Task]:
            raise ValueError(f"{context.label} needs a model")

    program = lp.Program("incomplete")
    program.add_node(Incomplete(1), label="a")
    assert mistakes_of(program) == ["a[0]: a needs a model"]


def test_a_plan_prints_as_a_tree() -> None:
    program = lp.Program("tree")
    with program.group("server"):
        servers = [program.add_node(lp.CourierNode(Service)) for _ in range(8)]
    program.add_node(lp.PyClassNode(Service, servers[:2]), label="few")
    program.add_node(lp.PyNode(ignore, servers), label="all")
    plan = lp.plan(program, "test_mp", {"server": {"cpu": 0.1, "gpu": 0}})
    lines = str(plan).splitlines()
    assert lines[0] == "tree  (test_mp: processes of this machine, silent)"
    assert lines[1] == "├── server  8 nodes, each cpu=0.1, gpu=0"
    assert lines[2] == "│   ├── server[0]  CourierNode(Service)"
    assert lines[9] == "│   └── server[7]  CourierNode(Service)"
    assert lines[10:13] == [
        "├── few  1 node",
        "│   └── few[0]  PyClassNode(Service)  calls server[0], server[1]",
        "└── all  1 node",
    ]
    assert lines[13] == (
        "    └── all[0]  PyNode(ignore)  calls "
        "server[0], server[1], server[2], server[3], server[4], and 3 more"
    )


ODD = [
    'a"b',
    "a&b",
    "&lt;",
    "&bogus;",
    "<b>",
    "a#b",
    "`a`",
    "ä 演员",
    "100%",
    "a;b",
    "{x|y}",
    "end",
]


def odd_plan() -> lp.LaunchPlan:
    program = lp.Program("<odd & 'program'>")
    handles = [program.add_node(lp.CourierNode(Service), label=label) for label in ODD]
    program.add_node(lp.PyNode(lambda: handles), label="caller")
    return lp.plan(program, "test_mp")


def test_mermaid_escapes_what_it_would_interpret() -> None:
    text = lp.render_mermaid(odd_plan())
    lines = text.splitlines()
    assert lines[0] == "flowchart LR"
    assert text.count("-->") == len(ODD)
    shown = []
    for line in lines[1:]:
        quoted = re.fullmatch(r'\s+(?:subgraph )?\w+\["([^"\[\]`\\&]*)"\]', line)
        if quoted is None:
            assert re.fullmatch(r"  end|  node\d+ --> node\d+", line), line
            continue
        parts = quoted[1].split("<br/>")
        assert not any(set("<>") & set(part) for part in parts)
        shown.append([re.sub(r"#(\d+);", lambda m: chr(int(m[1])), part) for part in parts])
    assert [[label] for label in ODD] == [each for each in shown if len(each) == 1][:-1]
    assert ["caller[0]", "PyNode(<lambda>)"] in shown


def test_svg_is_well_formed_and_shows_labels_as_they_are() -> None:
    if shutil.which("dot") is None:
        assert os.environ.get("CI") != "true", "CI draws: install graphviz"
        pytest.skip("needs the program dot of Graphviz")
    root = ET.fromstring(lp.render_svg(odd_plan()))
    space = "{http://www.w3.org/2000/svg}"
    texts = {"".join(each.itertext()) for each in root.iter(f"{space}text")}
    assert {label.replace("\u00a0", " ") for label in texts} >= {
        *ODD,
        *(f"{label}[0]" for label in ODD),
        "PyNode(<lambda>)",
    }
    edges = [each for each in root.iter(f"{space}g") if each.get("class") == "edge"]
    assert len(edges) == len(ODD)


def test_svg_without_dot_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("graphviz")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(lp.MissingExtraError, match="apt install graphviz"):
        lp.render_svg(odd_plan())


def test_services_that_run_already_are_part_of_the_picture() -> None:
    program = lp.Program("outside")
    database: Any = program.add_node(lp.ExternalNode("db.example.org:6379"), label="database")
    program.add_node(lp.PyNode(print, database), label="user")
    plan = lp.plan(program, "test_mp")
    assert str(plan).splitlines()[1:] == [
        "├── user  1 node",
        "│   └── user[0]  PyNode(print)  calls database[0]",
        "└── database[0]  ExternalNode(db.example.org:6379)  runs already",
    ]
    drawn = lp.render_mermaid(plan)
    assert 'service0(["database#91;0#93;<br/>ExternalNode(db.example.org:6379)"])' in drawn
    assert "node0 --> service0" in drawn
    (user,) = plan.executables
    assert (user.calls, user.services) == ((), ("database[0]",))


class Picky:
    def __init__(self, size: int, *, name: str = "") -> None: ...

    def run(self, steps: int) -> None: ...


class Yields:
    def run(self) -> Iterator[int]:
        yield 1


def picky(size: int) -> None: ...


@pytest.mark.parametrize(
    ("node", "words"),
    [
        (lp.CourierNode(Service, 1, a=2), ""),
        (lp.CourierNode(Box, 1, 2), "Box(content: Any = None) -> None: too many positional"),
        (lp.PyClassNode(Box, contents=1), "got an unexpected keyword argument 'contents'"),
        (lp.PyNode(picky), "picky(size: int) -> None: missing a required argument: 'size'"),
        (lp.CourierNode(Yields), "Yields.run yields: calling it would run nothing of it"),
        (lp.CourierNode(Picky, 1), "Picky.run(self, steps: int) -> None is called without argum"),
        (lp.ColocationNode([lp.PyNode(picky)]), "missing a required argument: 'size'"),
    ],
)
def test_arguments_that_do_not_fit_are_mistakes(node: lp.Node[Any], words: str) -> None:
    program = lp.Program("arguments")
    program.add_node(node, label="a")
    if not words:
        lp.plan(program)
        return
    with pytest.raises(lp.ProgramError, match=re.escape(words)) as caught:
        lp.plan(program)
    assert "a[0]: " in str(caught.value)


Number = TypeVar("Number")


class Storage:
    class Settings: ...

    @classmethod
    def of(cls, items: list[int]) -> "Storage": ...

    def sample(self, size: int) -> list[int]: ...


class Remembers:
    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self.sample = print

    def insert(self, item: int) -> None: ...


class SetsMethods:
    def __init__(self) -> None:
        self.dynamic = print


class Improves(SetsMethods):
    def __init__(self) -> None:
        super().__init__()

    def step(self) -> None: ...

    def run(self) -> None: ...


def make_improves() -> Any:
    return Improves()


class Steps(Protocol):
    def other(self) -> None: ...


class Dynamic:
    def dynamic(self) -> None: ...

    def run(self) -> None: ...


@dataclasses.dataclass
class Record:
    size: int
    name: str = ""


@dataclasses.dataclass(frozen=True)
class Calls:
    size: int = 0

    def __call__(self, size: str) -> None: ...


class Converts(type):
    def __call__(cls, size: Any) -> Any:
        return super().__call__(int(size))


class Converted(metaclass=Converts):
    def __init__(self, size: int) -> None: ...


class Holds(Generic[T]):
    def __init__(self, size: int) -> None: ...


@functools.wraps(picky)
def decorated(size: Any) -> None: ...


def literals(
    number: int, text: str, flag: bool, data: bytes, items: list[int], table: dict[str, int]
) -> None: ...


_FITS: dict[Any, dict[str, Any]] = {
    literals: {"number": 1, "text": "", "flag": True, "data": b"", "items": [], "table": {}}
}


def loose(
    fraction: float,
    maybe: int | str,
    whatever: Number,
    anything: Any,
    *more: int,
    wrong: str = 0,  # type: ignore[assignment]
) -> None: ...


def unresolved(number: int, other: "Nowhere" = 0) -> None: ...  # type: ignore[name-defined]  # noqa: F821


@pytest.mark.parametrize(
    ("function", "arguments", "wrong"),
    [
        (Picky, {"size": "10"}, "Picky: argument 'size' is annotated int, and is '10'"),
        (Record, {"size": [], "name": 3}, "'size' is annotated int, and is []; argument 'name' is"),
        (literals, {"text": 1.5}, "annotated str, and is 1.5"),
        (literals, {"flag": "false"}, "annotated bool, and is 'false'"),
        (literals, {"data": "x"}, "annotated bytes, and is 'x'"),
        (literals, {"items": {}}, "annotated list[int], and is {}"),
        (literals, {"table": [1]}, "annotated dict[str, int], and is [1]"),
        (literals, {"number": True, "flag": 1, "text": None, "items": (1,)}, ""),
        (literals, {"number": 1e6, "table": collections.Counter(), "data": bytearray()}, ""),
        (loose, {"fraction": 1, "maybe": "x", "wrong": 1, "whatever": "x", "anything": "x"}, ""),
        (unresolved, {"number": "10"}, ""),
        (Holds[str], {"size": "10"}, "Holds: argument 'size' is annotated int, and is '10'"),
        (Calls(), {"size": "10"}, ""),
        (Converted, {"size": "10"}, ""),
        (decorated, {"size": "10"}, ""),
    ],
)
def test_arguments_that_contradict_annotations_are_mistakes(
    function: Any, arguments: dict[str, Any], wrong: str
) -> None:
    program = lp.Program("annotations")
    arguments = {**_FITS.get(function, {}), **arguments}
    program.add_node(lp.PyNode(function, **arguments), label="a")
    if wrong:
        (told,) = mistakes_of(program)
        assert wrong in told
    else:
        lp.plan(program)


def takes(
    storage: Storage, learner: Improves, size: int = 0, steps: Steps | None = None
) -> None: ...


def takes_others(
    one: Steps, two: Dynamic, three: lp.Handle[Any], four: object, five: Any
) -> None: ...


def test_handles_whose_class_lacks_methods_of_the_annotated_one_are_mistakes() -> None:
    program = lp.Program("handles")
    storage = program.add_node(lp.CourierNode(Remembers), label="storage")
    learner = program.add_node(lp.CourierNode(Improves), label="learner")
    made = program.add_node(lp.CourierNode(make_improves), label="made")
    cached = program.add_node(lp.CacherNode(storage, 1, 1), label="cached")
    declared = program.declare("learner")
    for others in (
        (storage, learner),
        (cached, learner),
        (storage, made),
        (made, declared),
        (storage, learner, 3, learner),
    ):
        program.add_node(lp.PyNode(takes, *others), label=f"right {len(program.groups)}")
    program.add_node(
        lp.PyNode(takes_others, storage, learner, learner, learner, learner), label="b"
    )
    lp.plan(program)
    program.add_node(lp.PyNode(takes, declared, storage, learner), label="swapped")
    generic = program.add_node(lp.CourierNode(Holds[str], 3), label="generic")
    program.add_node(lp.PyNode(takes, generic, learner), label="other")
    told, of_generic = mistakes_of(program)
    assert "CourierHandle(generic[0]: Holds), which has no" in of_generic
    assert "'storage' is annotated" in told
    assert "which has no sample" in told
    assert "'learner' is annotated" in told
    assert "which has no step" in told
    assert "'size' is annotated int, and is CourierHandle(" in told


@pytest.mark.parametrize("chosen", ["/runs", {"a": "/runs"}])
def test_checkpoints_of_what_has_no_state_are_a_mistake(chosen: Any) -> None:
    program = lp.Program("stateless")
    program.add_node(lp.CourierNode(Box), label="a")
    with pytest.raises(lp.ProgramError, match=r"both save\(folder\) and restore"):
        lp.plan(program, checkpoints=chosen)
    program.add_node(lp.CourierNode(Service), label="b")
    if chosen == "/runs":
        lp.plan(program, checkpoints=chosen)


@pytest.mark.parametrize(
    ("option", "words"),
    [("resorces", "did you mean resources=?"), ("zzz", "the launcher 'local_mp' takes no others")],
)
def test_options_that_nothing_takes_are_refused(option: str, words: str) -> None:
    program = lp.Program("misspelt")
    program.add_node(lp.PyNode(ignore), label="a")
    with pytest.raises(TypeError, match=f"unknown option {option}=.*{re.escape(words)}"):
        lp.launch(program, "local_mp", **{option: {}})


def test_a_program_takes_no_nodes_while_it_runs() -> None:
    program = lp.Program("running")
    program.add_node(lp.PyNode(lp.wait_for_stop), label="a")
    with lp.launch(program, "test_mt"), pytest.raises(RuntimeError, match="'running' runs already"):
        program.add_node(lp.PyNode(ignore), label="b")
    program.add_node(lp.PyNode(ignore), label="b")


def test_an_open_file_is_refused(tmp_path: Path) -> None:
    program = lp.Program("files")
    with (tmp_path / "data.txt").open("w") as file:
        program.add_node(lp.CourierNode(Box, {"out": file}), label="a")
        (mistake,) = mistakes_of(program)
    assert "argument 0['out'] (a TextIOWrapper)" in mistake
    assert "it is an open file; pass its path and open it in the node" in mistake
