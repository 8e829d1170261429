"""`top` with keys, by Textual."""

import textwrap
from collections.abc import Callable
from typing import Any, ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.widgets import DataTable, Footer, Static
from textual.worker import get_current_worker

import courier
from launchpad_lite.errors import LaunchError
from launchpad_lite.insight._view import NodeRow, ProgramSight, ProgramView, view_text
from launchpad_lite.insight.top import PERIOD_S, table_of
from launchpad_lite.launching.registry import Inspector
from launchpad_lite.launching.status_table import cell
from launchpad_lite.parts.escapes import shown

#: Lines of output that are shown of a node.
_MOST_LINES = 1000


class TopApp(App[None]):
    """The table, and below it what a key has asked for."""

    CSS = "#nodes { height: 2fr; } #below { height: 1fr; display: none; }"
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("l", "show('logs')", "logs of the node"),
        Binding("s", "show('stack')", "stack of the node"),
        Binding("v", "show('views')", "views of the node"),
        Binding("w", "show('why')", "who waits for whom"),
        Binding("escape", "show('')", "only the table"),
        Binding("q", "quit", "quit"),
    ]

    def __init__(self, inspector: Inspector, view: ProgramView) -> None:
        super().__init__()
        self._inspector = inspector
        self._view = view
        self._rows: dict[str, NodeRow] = {}

    def compose(self) -> ComposeResult:
        """Makes the parts of the screen."""
        yield Static(id="title", markup=False)
        yield DataTable(id="nodes", cursor_type="row")
        with VerticalScroll(id="below"):
            yield Static(id="text", markup=False)
        yield Footer()

    def on_mount(self) -> None:
        """Begins to look."""
        self.run_worker(self._renew, thread=True, group="renew")

    def _renew(self) -> None:
        worker = get_current_worker()
        has_ended = False
        while not worker.is_cancelled:
            try:
                self.call_from_thread(self._show_nodes, self._view.look())
                if has_ended:
                    return
                has_ended = self._inspector.join(PERIOD_S)
            except courier.CourierError:
                self.call_from_thread(self.query_one("#title", Static).update, "it has ended")
                return

    def _show_nodes(self, sight: ProgramSight) -> None:
        self.query_one("#title", Static).update(Text(shown(sight.title)))
        table: DataTable[Text] = self.query_one("#nodes", DataTable)
        self._rows = {row.status.name: row for row in sight.rows}
        head, rows = table_of(sight.rows)
        if len(table.columns) != len(head):
            table.clear(columns=True)
            for name in head:
                table.add_column(name, key=name)
        for node, row in zip(self._rows, rows, strict=True):
            # Text, because in strings of nodes brackets would be markup.
            values = [Text(shown(cell(each))) for each in row]
            if node not in table.rows:
                table.add_row(*values, key=node)
            else:
                for name, value in zip(head, values, strict=True):
                    if table.get_cell(node, name) != value:
                        table.update_cell(node, name, value, update_width=True)

    def action_show(self, what: str) -> None:
        """Shows the logs, the stack or the views of the chosen node, or who waits for whom."""
        table = self.query_one("#nodes", DataTable)
        below = self.query_one("#below", VerticalScroll)
        below.display = bool(what)
        if not what or not table.row_count:
            return
        key: Any = table.coordinate_to_cell_key(table.cursor_coordinate).row_key.value
        answers: dict[str, Callable[[], str]] = {
            "logs": lambda: self._logs(key),
            "stack": lambda: f"{key}\n{textwrap.indent(self._inspector.stacks()[key], '  ')}",
            "views": lambda: self._views(key),
            "why": self._inspector.why,
        }

        def ask() -> None:
            try:
                text = answers[what]()
            except (LaunchError, courier.CourierError) as error:
                text = str(error)
            self.call_from_thread(self._show_text, text, to_end=what == "logs")

        self._show_text("...")
        self.run_worker(ask, thread=True, group="below", exclusive=True)

    def _logs(self, node: str) -> str:
        lines = [line for each, line in self._inspector.output() if each == node]
        return b"\n".join(line.rstrip() for line in lines[-_MOST_LINES:]).decode(errors="replace")

    def _views(self, node: str) -> str:
        views = (self._rows[node].numbers.get("metrics") or {"view": {}})["view"]
        texts = [f"{name}\n{view_text(value)}" for name, value in views.items()]
        return "\n".join(texts) or f"{node} has none"

    def _show_text(self, text: str, *, to_end: bool = False) -> None:
        self.query_one("#text", Static).update(Text.from_ansi(shown(text)))
        if to_end:
            self.query_one("#below", VerticalScroll).scroll_end(animate=False)
