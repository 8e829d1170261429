"""Programs: named, typed graphs under construction."""

import contextlib
import re
from collections.abc import Iterator
from typing import Any, TypeVar

from launchpad_lite.nodes.base import Handle, Node

T = TypeVar("T")

_A_LABEL = "a label"

# A label becomes part of `label[replica]` and of file names.
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
        self._current: str | None = None

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
            node: What to add; its kinds in one group may differ.
            label: Its group; not needed inside `with program.group(label)`.

        Raises:
            TypeError: `node` is no node.
            ValueError: No label, or another than that of the open group, or the node was added
                before.
        """
        if not isinstance(node, Node):
            raise TypeError(f"add_node takes a node, like lp.CourierNode(Learner), not {node!r}")
        if self._current is not None and label is not None and label != self._current:
            raise ValueError(f"the label {label!r} does not match the open group {self._current!r}")
        label = _checked_label(self._current if label is None else label, _A_LABEL)
        for other, nodes in self._groups.items():
            if any(node is known for known in nodes):
                raise ValueError(
                    f"this node was already added, to the group {other!r}; make one node object "
                    "for each service (create_handle() gives more handles to one)"
                )
        self._groups.setdefault(label, []).append(node)
        return node.create_handle()

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
    return label
