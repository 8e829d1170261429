"""Pictures of a plan: Mermaid text, and SVG drawn by Graphviz."""

import shutil
from collections.abc import Iterator
from typing import Any

from launchpad_lite.errors import MissingExtraError
from launchpad_lite.planning.plan import LaunchPlan

#: Special characters of Mermaid's text, which is also HTML: `PyNode(<lambda>)` would be a tag.
_MERMAID_ESCAPES = {ord(char): f"#{ord(char)};" for char in '#"&<>[]`\\'}


def render_mermaid(plan: LaunchPlan) -> str:
    """Returns the graph as a Mermaid flowchart, which GitHub and many editors draw.

    Example:
        print(lp.render_mermaid(lp.plan(program)))
    """
    return "\n".join(["flowchart LR", *_mermaid_lines(plan)]) + "\n"


def _mermaid_lines(plan: LaunchPlan) -> Iterator[str]:
    ids, service_ids = _ids(plan)
    for index, (label, members) in enumerate(plan.groups().items()):
        yield f'  subgraph group{index}["{_mermaid_text(label)}"]'
        for each in members:
            yield f'    {ids[each.name]}["{_mermaid_text(each.name, each.description)}"]'
        yield "  end"
    for service in plan.services:
        text = _mermaid_text(service.name, service.description)
        yield f'  {service_ids[service.name]}(["{text}"])'
    for caller, callee in _edges(plan):
        yield f"  {caller} --> {callee}"


def _mermaid_text(*lines: str) -> str:
    return "<br/>".join(line.translate(_MERMAID_ESCAPES) for line in lines)


def render_svg(plan: LaunchPlan) -> str:
    """Returns the graph as SVG.

    Raises:
        MissingExtraError: Graphviz, the program or its Python package, is not installed.

    Example:
        Path("graph.svg").write_text(lp.render_svg(lp.plan(program)))
    """
    try:
        import graphviz
    except ImportError as error:
        raise MissingExtraError(
            "drawing SVG needs the package 'graphviz'. Run: pip install 'launchpad-lite[render]'"
        ) from error
    if shutil.which("dot") is None:
        raise MissingExtraError(
            "drawing SVG needs the program 'dot' of Graphviz: apt install graphviz, brew install "
            "graphviz, or without admin rights conda install graphviz. Mermaid needs nothing"
        )
    graph = graphviz.Digraph(
        _svg_text(plan.program),
        graph_attr={"rankdir": "LR", "fontname": "Helvetica", "bgcolor": "transparent"},
        node_attr={
            "shape": "box",
            "style": "rounded,filled",
            "fillcolor": "white",
            "color": "#5b6b7b",
            "fontname": "Helvetica",
            "fontsize": "11",
        },
        edge_attr={"color": "#5b6b7b", "arrowsize": "0.7"},
    )
    ids, service_ids = _ids(plan)
    for index, (label, members) in enumerate(plan.groups().items()):
        with graph.subgraph(name=f"cluster_{index}") as cluster:
            cluster.attr(
                label=_svg_text(label), style="rounded,filled", color="#dde4ea", fillcolor="#f3f6f8"
            )
            for member in members:
                cluster.node(ids[member.name], _svg_text(f"{member.name}\n{member.description}"))
    for service in plan.services:
        text = _svg_text(f"{service.name}\n{service.description}")
        graph.node(service_ids[service.name], text, style="filled", shape="box", penwidth="2")
    for caller, callee in _edges(plan):
        graph.edge(caller, callee)
    return str(graph.pipe(format="svg", encoding="utf-8"))


def _svg_text(text: str) -> Any:
    from graphviz import escape

    # Graphviz takes `&...;` for an entity, known or not.
    return escape(text.replace("&", "&amp;"))


def _ids(plan: LaunchPlan) -> tuple[dict[str, str], dict[str, str]]:
    """Returns the ids of executables and of services by name: one of each may have the same name."""
    nodes = {each.name: f"node{index}" for index, each in enumerate(plan.executables)}
    services = {each.name: f"service{index}" for index, each in enumerate(plan.services)}
    return nodes, services


def _edges(plan: LaunchPlan) -> Iterator[tuple[str, str]]:
    """Yields the ids of callers and their callees."""
    ids, service_ids = _ids(plan)
    for caller in plan.executables:
        for callee in caller.calls:
            yield ids[caller.name], ids[callee]
        for service in caller.services:
            yield ids[caller.name], service_ids[service]
