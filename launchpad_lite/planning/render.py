"""Pictures of a plan: Mermaid text, and SVG drawn by Graphviz."""

import shutil
from collections.abc import Iterator
from typing import Any

from launchpad_lite.errors import MissingExtraError
from launchpad_lite.planning.plan import LaunchPlan

#: Special characters of Mermaid's text, which is also HTML: `PyNode(<lambda>)` would be a tag.
_MERMAID_SPECIAL = frozenset('#"&<>[]`\\')


def render_mermaid(plan: LaunchPlan) -> str:
    """Returns the graph as a Mermaid flowchart, which GitHub and many editors draw.

    Example:
        print(lp.render_mermaid(lp.plan(program)))
    """
    return "\n".join(["flowchart LR", *_mermaid_groups(plan), *_mermaid_edges(plan)]) + "\n"


def _mermaid_groups(plan: LaunchPlan) -> Iterator[str]:
    ids = _ids(plan)
    for index, (label, members) in enumerate(plan.groups().items()):
        yield f'  subgraph group{index}["{_mermaid_text(label)}"]'
        for member in members:
            text = f"{_mermaid_text(member.name)}<br/>{_mermaid_text(member.description)}"
            yield f'    {ids[member.name]}["{text}"]'
        yield "  end"
    for service in plan.services:
        text = f"{_mermaid_text(service.name)}<br/>{_mermaid_text(service.description)}"
        yield f'  {_service_ids(plan)[service.name]}(["{text}"])'


def _mermaid_edges(plan: LaunchPlan) -> Iterator[str]:
    for caller, callee in _edges(plan):
        yield f"  {caller} --> {callee}"


def _mermaid_text(text: str) -> str:
    return "".join(f"#{ord(char)};" if char in _MERMAID_SPECIAL else char for char in text)


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
    ids = _ids(plan)
    for index, (label, members) in enumerate(plan.groups().items()):
        with graph.subgraph(name=f"cluster_{index}") as cluster:
            cluster.attr(
                label=_svg_text(label), style="rounded,filled", color="#dde4ea", fillcolor="#f3f6f8"
            )
            for member in members:
                cluster.node(ids[member.name], _svg_text(f"{member.name}\n{member.description}"))
    for service in plan.services:
        text = _svg_text(f"{service.name}\n{service.description}")
        graph.node(
            _service_ids(plan)[service.name], text, style="filled", shape="box", penwidth="2"
        )
    for caller, callee in _edges(plan):
        graph.edge(caller, callee)
    return str(graph.pipe(format="svg", encoding="utf-8"))


def _svg_text(text: str) -> Any:
    from graphviz import escape

    # Graphviz takes `&...;` for an entity, known or not.
    return escape(text.replace("&", "&amp;"))


def _ids(plan: LaunchPlan) -> dict[str, str]:
    return {each.name: f"node{index}" for index, each in enumerate(plan.executables)}


def _service_ids(plan: LaunchPlan) -> dict[str, str]:
    return {each.name: f"service{index}" for index, each in enumerate(plan.services)}


def _edges(plan: LaunchPlan) -> Iterator[tuple[str, str]]:
    """Yields the ids of callers and their callees."""
    ids, service_ids = _ids(plan), _service_ids(plan)
    for caller in plan.executables:
        for callee in caller.calls:
            yield ids[caller.name], ids[callee]
        for service in caller.services:
            yield ids[caller.name], service_ids[service]
