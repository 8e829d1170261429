"""Who waits for whom in a program, deduced from what its threads do. Asks and starts nothing."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from launchpad_lite.life.events import (
    AT_MOST,
    COMPUTES,
    IN_LIBRARY,
    READS,
    SLEEPS,
    WAITS_FOR_FILES,
    WAITS_FOR_PROCESS,
    Looked,
    ThreadActivity,
)
from launchpad_lite.life.result import named
from launchpad_lite.parts.as_json import to_json

DEADLOCK = "deadlock: "  # how its text begins
STALLED = "no node computes"  # the last line about a program in which nothing can go on by itself
#: How a thread does that may go on by what comes from outside of the program.
_FROM_OUTSIDE = (READS, WAITS_FOR_FILES, WAITS_FOR_PROCESS)
#: Why a node does not answer, by the state of its process; a letter as in `/proc/PID/stat`.
_SILENCE = {
    "": "it was stopped, its host is busy, or it runs code that holds the GIL",
    "D": "it waits for a disk, or for files on the network",
    "R": "it runs code that holds the GIL, or its host is busy",
    "S": "it waits in code that holds the GIL, or its host is busy",
    "T": "it was stopped by a signal, and goes on after SIGCONT",
}
_MOST = 10  # nodes, chains and causes to name; more are counted


@dataclass
class ServingNode:
    """A node as others call it."""

    state: str  # as in `NodeStatus`
    servers: Sequence[str]  # names and addresses of its servers
    pid: int | None  # its process, if that is known
    look: Looked | None  # what its threads do; None: it does not answer
    kernel_state: str = ""  # of its process, as in `/proc/PID/stat`


@dataclass(eq=False)
class _Actor:
    """A thread or a task of a node, and which of them it waits for: any one of `targets` would do."""

    node: str
    does: ThreadActivity
    targets: "list[_Actor]" = field(default_factory=list)
    cause: str = ""  # why it waits, if it is for no actor
    #: Whether it waits behind what `targets` do, because they take all threads of the server.
    is_queued: bool = False

    @property
    def label(self) -> str:
        return f"{self.node}.{self.does.runs}"

    @property
    def doing(self) -> str:
        return f"{self.does.doing} ({self.does.place})"


def explain(nodes: Mapping[str, ServingNode]) -> str:
    """Returns why a program does not go on: what waits in a circle, then what others wait for.

    A call that no handler of its server answers yet counts as moving, unless all threads of the
    server answer others: so no deadlock is told that is none, if the look at all nodes is of one
    moment.
    """
    actors = _actors(nodes)
    parts = [*_deadlocks(actors), *_causes(actors)]
    silent = [name for name, node in nodes.items() if node.look is None]
    for name in silent[:_MOST]:
        if not any(f" {name}, which" in each for each in parts):
            parts.append(f"{name} {silence(nodes[name].state, nodes[name].kernel_state)}")
    # Those that have ended let nobody go on.
    if all(nodes[name].state == "ended" for name in silent) and _is_stalled(actors):
        parts.append(STALLED)
    return "\n".join(parts) or _idle(actors)


def graph(nodes: Mapping[str, ServingNode]) -> dict[str, Any]:
    """Returns what `explain` says, and what it is made of, for JSON."""
    actors = _actors(nodes)
    numbers = {each: number for number, each in enumerate(actors)}
    threads = [
        {
            **to_json(each.does),
            "node": each.node,
            "waits_for": [numbers[target] for target in each.targets],
            "is_queued": each.is_queued,
            "cause": each.cause,
        }
        for each in actors
    ]
    return {
        "text": explain(nodes),
        "nodes": [
            {"name": name, "state": each.state, "pid": each.pid, "answers": each.look is not None}
            for name, each in nodes.items()
        ],
        "threads": threads,
        "deadlocks": [[numbers[each] for each in circle] for circle in _circles(actors)],
        "causes": [*_causes(actors)],
    }


def silence(state: str, kernel_state: str = "") -> str:
    """Returns why a node does not tell what its threads do."""
    if state in ("running", "serving"):
        return f"does not answer: {_SILENCE.get(kernel_state, _SILENCE[''])}"
    return f"is {state}"


def _actors(nodes: Mapping[str, ServingNode]) -> list[_Actor]:
    actors = [
        _Actor(name, each)
        for name, node in nodes.items()
        if node.look is not None
        for each in node.look.threads
    ]
    owners = {server: name for name, node in nodes.items() for server in node.servers}
    serving: dict[str, list[_Actor]] = {}
    own: dict[str, list[_Actor]] = {}
    for each in actors:
        (serving if each.does.peer else own).setdefault(each.node, []).append(each)
    calls: dict[tuple[int | None, str, str], list[_Actor]] = {}
    # A node's own code first: most calls that it answers came later.
    threads = {(nodes[each.node].pid, each.does.thread): each for each in actors}
    for each in sorted(actors, key=lambda each: each.does.peer != ""):
        does = each.does
        if not does.server:
            holder = threads.get((nodes[each.node].pid, does.behind)) if does.behind else None
            each.targets = [] if holder is None or holder is each else [holder]
            continue
        if (owner := owners.get(does.server)) is None:
            each.cause = f"{does.server}, which is no node of this program"
        elif nodes[owner].look is None:
            each.cause = f"{owner}, which {silence(nodes[owner].state, nodes[owner].kernel_state)}"
        elif not does.method:  # for the node, not for an answer
            each.targets = own.get(owner, [])
        else:
            calls.setdefault((nodes[each.node].pid, owner, does.method), []).append(each)
    for (pid, owner, method), callers in calls.items():
        others = serving.get(owner, [])
        handlers = [
            each
            for each in others
            if each.does.runs == method and _may_come_from(each.does.peer, pid)
        ] or [each for each in own.get(owner, []) if each.does.runs == method]  # a generator, say
        look = nodes[owner].look
        is_full = look is not None and look.is_full
        for index, each in enumerate(callers):
            each.is_queued = is_full and index >= len(handlers)
            if is_full or len(callers) <= len(handlers):
                each.targets = [x for x in handlers if x is not each] or handlers or others
            elif nodes[owner].state == "starting":  # it serves when its constructor has returned
                each.targets = own.get(owner, [])
    return actors


def _may_come_from(peer: str, pid: int | None) -> bool:
    here = (f"process {pid} ", f"process {pid},")
    return pid is None or not peer.startswith("process ") or peer.startswith(here)


def _distances(actors: Sequence[_Actor], *, limits: bool) -> dict[_Actor, int]:
    """Returns of each that may go on how many others go first; `limits`: some waits end."""
    found = {each: 0 for each in actors if not each.targets or (each.does.is_limited and limits)}
    for distance in range(1, len(actors)):
        more = [
            each
            for each in actors
            if each not in found and not found.keys().isdisjoint(each.targets)
        ]
        if not more:
            break
        found |= dict.fromkeys(more, distance)
    return found


def _deadlocks(actors: Sequence[_Actor]) -> Iterator[str]:
    for circle in _circles(actors):
        steps = " → ".join(each.label for each in [*circle, circle[0]])
        yield f"{DEADLOCK}{steps}" + "".join(f"\n  {_step(each)}" for each in circle)


def _circles(actors: Sequence[_Actor]) -> Iterator[list[_Actor]]:
    moving = _distances(actors, limits=True)
    told: set[_Actor] = set()
    for start in actors:
        if start in moving or start in told:
            continue
        path = [start]
        while (following := path[-1].targets[0]) not in path:
            path.append(following)
        circle = path[path.index(following) :]
        if told.isdisjoint(circle):
            yield circle
        told.update(path)


def _step(actor: _Actor) -> str:
    does = actor.does
    if not does.server:
        return f"{actor.label} {actor.doing}"
    behind = ""
    if actor.is_queued:
        others = named(sorted({each.does.runs for each in actor.targets}), _MOST)
        behind = f", which waits for a thread: all run {others}"
    server = f"{does.server}: {does.method}" if does.method else does.server
    return f"{actor.label} waits for {server}{behind} ({does.place})"


def _causes(actors: Sequence[_Actor]) -> Iterator[str]:
    """Yields what ends chains of calls: that for which most wait first, and the library's own last."""
    distances = _distances(actors, limits=False)
    waiting: dict[tuple[str, str], list[_Actor]] = {}
    for start in actors:
        is_waiting = start.does.server or start.targets
        if is_waiting and (start in distances or start.does.is_limited):
            how = "" if start.does.server else start.does.doing  # for a thread of its own process
            waiting.setdefault((how, _ending([*_chain(start, distances)][-1])), []).append(start)
    ranked = sorted(
        waiting.items(),
        key=lambda each: (all(x.does.place == IN_LIBRARY for x in each[1]), -len(each[1])),
    )
    for (how, text), starts in ranked[:_MOST]:
        waiters = sorted({each.label for each in starts})
        wait = f"{how}:" if how else "waits for" if len(waiters) == 1 else "wait for"
        yield f"{named(waiters, 3)} {wait} {text}"


def _is_stalled(actors: Sequence[_Actor]) -> bool:
    """Returns whether some wait for others without a limit, and no other goes on meanwhile."""
    if any(
        each.does.doing in (COMPUTES, SLEEPS)
        # It may give what comes from outside to any other, or goes on when its time is over.
        or (
            (_hears(each.does) or each.does.doing.endswith(AT_MOST))
            and each.does.place != IN_LIBRARY
            and not each.does.server
        )
        for each in actors
    ):
        return False
    distances = _distances(actors, limits=False)
    chains = (
        [*_chain(each, distances)]
        for each in actors
        if each.targets and each in distances and each.does.place != IN_LIBRARY
    )
    return any(
        not any(each.does.is_limited for each in chain) and not _hears(chain[-1].does)
        for chain in chains
    )


def _hears(does: ThreadActivity) -> bool:
    return does.doing.startswith(_FROM_OUTSIDE)


def _chain(actor: _Actor, distances: Mapping[_Actor, int]) -> Iterator[_Actor]:
    """Yields who waits for whom, from an actor to the nearest that waits for no other."""
    yield actor
    while actor.targets and actor in distances:
        actor = min(
            (each for each in actor.targets if each in distances), key=distances.__getitem__
        )
        yield actor


def _ending(actor: _Actor) -> str:
    does = actor.does
    if actor.cause:
        return actor.cause
    if does.server and not does.method:
        return f"{does.server} ({does.place})"
    if does.server:
        wait = AT_MOST if actor.targets else ", not begun yet or answered later"
        return f"{does.server}: {does.method}{wait} ({does.place})"
    return f"{actor.label}, which {actor.doing}"


def _idle(actors: Sequence[_Actor]) -> str:
    lines = [f"{each.label} {each.doing}" for each in actors]
    more = f"\nand {len(lines) - _MOST} more" if len(lines) > _MOST else ""
    return "\n".join(["no node waits in a call of another", *lines[:_MOST]]) + more
