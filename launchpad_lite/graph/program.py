"""Programs: named, typed graphs under construction."""

import contextlib
import re
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from launchpad_lite.nodes.base import DeclaredHandle, Handle, Node
from launchpad_lite.parts.settings import check_number

if TYPE_CHECKING:
    from launchpad_lite.launching import RunningProgram

T = TypeVar("T")

_A_LABEL = "a label"

# A label becomes part of `label[replica]` and of file names.
_MAX_LABEL_BYTES = 128
_LABEL = re.compile(r"[^\s/\\\[\]\x00-\x1f]+( [^\s/\\\[\]\x00-\x1f]+)*")


class Program:
    """A graph of services: groups of nodes, and edges given by handles.

    Building one is ordinary Python and runs nothing. Not thread-safe.

    Example:
        program = lp.Program("consumer_producers")
        with program.group("producer"):
            producer = program.add_node(lp.CourierNode(Range, 0, 10))
        program.add_node(lp.CourierNode(Consumer, [producer]), label="consumer")
    """

    def __init__(self, name: str) -> None:
        """Makes an empty program.

        Args:
            name: Shown to people, and part of folder names.

        Raises:
            ValueError: The name is empty or cannot be part of a file name.
        """
        self.name = _checked_label(name, "a program's name")
        self._groups: dict[str, list[Node[Any]]] = {}
        self._declared: dict[tuple[str, int], DeclaredHandle] = {}
        self._current: str | None = None
        self._runs: weakref.WeakSet[RunningProgram] = weakref.WeakSet()

    def note_run(self, running: "RunningProgram") -> None:
        """Refuses more nodes while the program runs. For launchers."""
        self._runs.add(running)

    @property
    def groups(self) -> dict[str, list[Node[Any]]]:
        """The nodes of each group by label, in the order of their addition."""
        return self._groups

    @property
    def current_group(self) -> str:
        """The label of the group that is open.

        Raises:
            ValueError: None is.
        """
        if self._current is None:
            raise ValueError("no group is open; use `with program.group(label):`")
        return self._current

    def get_all_nodes(self) -> list[Node[Any]]:
        """Returns all nodes, group by group."""
        return [node for nodes in self._groups.values() for node in nodes]

    def add_node(self, node: Node[T], label: str | None = None) -> Handle[T]:
        """Adds a node and returns a handle to it.

        Args:
            node: The node; a group may have different kinds.
            label: Its group; not needed inside `with program.group(label)`.

        Raises:
            TypeError: `node` is no node.
            ValueError: No label, or another than that of the open group, or the node was added
                before.
            RuntimeError: The program runs.
        """
        if any(running.result is None for running in self._runs):
            raise RuntimeError(
                f"program {self.name!r} runs already, and takes no more nodes: add all of them before "
                "lp.launch, or make another program"
            )
        if not isinstance(node, Node):
            raise TypeError(f"add_node takes a node, like lp.CourierNode(Learner), not {node!r}")
        if self._current is not None and label is not None and label != self._current:
            raise ValueError(f"the label {label!r} does not match the open group {self._current!r}")
        label = _checked_label(self._current if label is None else label, _A_LABEL)
        new = {id(part) for part in node.with_inner()}
        for other, nodes in self._groups.items():
            if any(id(part) in new for known in nodes for part in known.with_inner()):
                what = "a node in it" if node.inner_nodes else "this node"
                raise ValueError(
                    f"{what} was already added, to the group {other!r}; make one node object "
                    "for each service (create_handle() gives more handles to one)"
                )
        group = self._groups.setdefault(label, [])
        group.append(node)
        for part in node.with_inner():
            part._added_to = self.name
            for address in part.addresses:
                address.node = f"{label}[{len(group) - 1}]"
        declared = self._declared.get((label, len(group) - 1))
        if declared is not None:
            declared.bind(node.create_handle())
        return node.create_handle()

    def declare(self, label: str, replica: int = 0) -> Handle[Any]:
        """Returns a handle to a node that will be added later: the way to draw a cycle.

        Args:
            label: The group of the node.
            replica: Its index among the nodes of the group.

        Raises:
            TypeError: The label is no text, or the index no whole number.
            ValueError: The label is none, or the index is below 0.

        Example:
            learner = program.declare("learner")
            actor = program.add_node(lp.CourierNode(Actor, learner), label="actor")
            program.add_node(lp.CourierNode(Learner, actor), label="learner")
        """
        label = _checked_label(label, _A_LABEL)
        check_number("a replica", replica, 0)
        declared = self._declared.setdefault((label, replica), DeclaredHandle(label, replica))
        group = self._groups.get(label, [])
        if replica < len(group):
            declared.bind(group[replica].create_handle())
        return declared

    @contextlib.contextmanager
    def group(self, label: str) -> Iterator[None]:
        """Opens a group: nodes added inside belong to it. May be opened again later.

        Raises:
            ValueError: The label is empty, or another group is open.
        """
        if self._current is not None:
            raise ValueError(
                f"groups cannot be nested: {self._current!r} is open, asked for {label!r}"
            )
        self._current = _checked_label(label, _A_LABEL)
        try:
            yield
        finally:
            self._current = None

    def __repr__(self) -> str:
        sizes = ", ".join(f"{label}[{len(nodes)}]" for label, nodes in self._groups.items())
        return f"Program({self.name!r}: {sizes or 'empty'})"


def make_program(*nodes: Node[Any], name: str = "launchpad") -> Program:
    """Returns a program of these nodes, in groups with the names of their classes or functions.

    For tests and small scripts: `make_program(lp.CourierNode(Learner))` has a group `learner`.

    Raises:
        TypeError: Something is no node.
        ValueError: A node comes twice.

    Example:
        program = lp.make_program(lp.CourierNode(Learner), lp.PyNode(evaluate), name="search")
    """
    program = Program(name)
    for node in nodes:
        program.add_node(node, label=_label_of(node))
    return program


def _label_of(node: object) -> str:
    kind = type(node).__name__
    # The name of its class or function, if there is one: `ColocationNode(2 nodes)` has none.
    found = re.fullmatch(r"\w+\(<?([^\W\d][\w.-]*)>?\)", str(getattr(node, "description", "")))
    name = found[1] if found else kind
    parted = re.sub(r"(?<=[^\W_A-Z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])|\W", "_", name)
    return parted.lower().strip("_") or kind.lower()


def _checked_label(label: str | None, what: str) -> str:
    if label is not None and not isinstance(label, str):
        raise TypeError(f"{what} is a string, not {label!r}")
    if not label:
        hint = "write add_node(node, label='actor'), or `with program.group('actor'):`"
        raise ValueError(f"{what} cannot be empty" + (f"; {hint}" if what == _A_LABEL else ""))
    if not _LABEL.fullmatch(label) or not label.isprintable() or label in (".", ".."):
        raise ValueError(
            f"{what} is printable text without slashes, brackets and outer spaces, not {label!r}"
        )
    if (size := len(label.encode())) > _MAX_LABEL_BYTES:
        raise ValueError(
            f"{what} has at most {_MAX_LABEL_BYTES} bytes, because it becomes part of file names; "
            f"{label[:40]!r}... has {size}"
        )
    return label
