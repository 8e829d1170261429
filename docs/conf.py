"""How Sphinx makes a site of the documentation: `make docs`."""

import re

project = "launchpad-lite"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinxcontrib.mermaid"]
html_theme = "furo"
html_title = "launchpad-lite"
autoclass_content = "both"
autodoc_member_order = "bysource"
myst_heading_anchors = 4
myst_fence_as_directive = ["mermaid"]
exclude_patterns = ["_build"]


def _to_rst(app, what, name, obj, options, lines):  # noqa: ARG001
    """Turns the Markdown of our docstrings, code in single backticks, into what Sphinx reads."""
    text = re.sub(r"(?<!`)`([^`\n]+)`(?!`)", r"``\1``", "\n".join(lines))
    # The trees of errors.
    text = re.sub(r"\.\n\n(?=    \w+\n    ├)", "::\n\n", text)
    # A literal block in place of a section that would be read as text.
    lines[:] = re.sub(r"^(\s*)Example:$", r"\1Example::\n", text, flags=re.MULTILINE).split("\n")


def setup(app):
    """Registers it before the extension that reads the sections of docstrings."""
    app.connect("autodoc-process-docstring", _to_rst, priority=100)
