"""The states of nodes as a table: for the command `status`, and in notebooks, where it is renewed."""

import html
import threading
import time
import uuid
import weakref
from collections.abc import Sequence
from typing import Any

from courier.lowlevel import loaded_module, surviving
from launchpad_lite.launching import NodeStatus, RunningProgram
from launchpad_lite.parts.escapes import shown

_PERIOD_S = 1.0
#: The display of each program in a notebook, which all cells that show it share.
_DISPLAYS: "weakref.WeakKeyDictionary[RunningProgram, str]" = weakref.WeakKeyDictionary()


def render_status(status: Sequence[NodeStatus]) -> str:
    """Returns a table of the states of nodes."""
    head = ("node", "state", "since", "host", "pid", "restarts", "cores", "MiB")
    rows: list[Sequence[object]] = [head]
    for each in status:
        since = each.since and time.strftime("%H:%M:%S", time.localtime(each.since))
        usage = (each.cpu, each.memory_mib)
        rows.append((each.name, each.state, since, each.host, each.pid, each.restarts, *usage))
    waits = [f"{each.name} waits for {each.waits_for}" for each in status if each.waits_for]
    return "\n".join([text_table(rows), *waits])


def text_table(rows: Sequence[Sequence[object]]) -> str:
    """Returns rows as text, in columns."""
    cells = [[*map(cell, row)] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    )


def cell(value: object) -> str:
    """Returns a value as a table shows it."""
    if value is None:
        return "-"
    return f"{value:.1f}" if isinstance(value, float) else str(value)


def show(running: RunningProgram) -> None:
    """Shows a program below a cell; one thread renews all its cells, until it has ended."""
    module = loaded_module("IPython")
    if module is None or getattr(module.get_ipython(), "kernel", None) is None:
        raise NotImplementedError  # no notebook: IPython takes the `repr` then
    is_first = running not in _DISPLAYS
    place = _DISPLAYS.setdefault(running, uuid.uuid4().hex)
    module.display.display(mimes(running), raw=True, display_id=place)
    if is_first:
        renew = (running, module.display.update_display, place)
        threading.Thread(target=_renew, args=renew, name="launchpad-table", daemon=True).start()


def _renew(running: RunningProgram, update: Any, place: str) -> None:
    has_ended = False
    while not has_ended:
        has_ended = running.join(_PERIOD_S)
        with surviving("the table of a program"):
            update(mimes(running), raw=True, display_id=place)


def mimes(running: RunningProgram) -> dict[str, str]:
    """Returns a program and its nodes as text and as HTML. Names are text in both."""
    text = shown(f"{running!r}\n\n{render_status(running.status())}")
    link = (
        running.page_url and f'<a href="{running.page_url}" target="_blank">{running.page_url}</a>'
    )
    return {"text/plain": text, "text/html": f"<pre>{html.escape(text)}</pre>{link or ''}"}
