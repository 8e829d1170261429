"""`docs/benchmarks.md`, and the parts of it that are generated."""

from benchmarks.environments import ROOT

PAGE = ROOT / "docs" / "benchmarks.md"


def put(name: str, text: str) -> None:
    """Replaces a generated part of the page.

    Args:
        name: What it is called in the comments around it.
        text: Markdown, without a line end at the end.
    """
    begin, end = f"<!-- begin of {name} -->\n", f"<!-- end of {name} -->\n"
    before, found, rest = PAGE.read_text(encoding="utf-8").partition(begin)
    _, closed, after = rest.partition(end)
    assert found, begin
    assert closed, end
    PAGE.write_text(f"{before}{begin}{text}\n{end}{after}", encoding="utf-8")
