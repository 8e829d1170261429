"""Type checkers and editors follow calls from the node's class to the client.

Checkers report each planted mistake and nothing else, without a plug-in. docs/calls.md says what
each of them finds, and of which version: these are the versions that run here.
"""

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

_ROOT = Path(__file__).resolve().parents[2]
_SNIPPET = Path(__file__).with_name("planted_mistakes.py")
_CACHE = _ROOT / ".cache" / "type_checkers"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


class Row(NamedTuple):
    """What docs/calls.md says of a checker."""

    version: str
    found: int
    planted: int
    false_errors: int


def row_of(checker: str) -> Row:
    page = (_ROOT / "docs" / "calls.md").read_text(encoding="utf-8")
    row = re.search(
        rf"^\| {checker}\b.* \| ([\d.]+) \| (\d+) of (\d+) \| (\d+) \|$", page, re.MULTILINE
    )
    assert row is not None, checker
    return Row(row[1], *map(int, row.groups()[1:]))


def check(checker: str, reported: set[int], output: str) -> None:
    """Compares the lines that a checker reports with the marks, and with the documentation."""
    mark = re.compile(r"# (mistake|right)\b(.*)")
    marks = dict(enumerate(map(mark.search, _SNIPPET.read_text().splitlines()), start=1))
    planted = {line for line, found in marks.items() if found and found[1] == "mistake"}
    unlike = {line for line, found in marks.items() if found and checker in found[2].split()}
    assert sorted(reported) == sorted(planted ^ unlike), output
    missed, wrong = len(planted & unlike), len(unlike - planted)
    figures = row_of(checker)[1:]
    assert figures == (len(planted) - missed, len(planted), wrong)


@pytest.mark.parametrize("options", [["--config-file="], []], ids=["plain", "strict"])
def test_mypy_reports_exactly_the_planted_mistakes(tmp_path: Path, options: list[str]) -> None:
    try:
        installed = importlib.metadata.version("mypy")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("mypy is not installed")
    assert installed == row_of("mypy").version
    cache = ["--no-incremental", "--cache-dir", str(tmp_path)]
    done = run([sys.executable, "-m", "mypy", *cache, *options, _SNIPPET])
    reported = re.findall(r"^(.*?):(\d+): error", done.stdout, re.MULTILINE)
    assert {Path(file).name for file, _ in reported} == {_SNIPPET.name}, done.stdout
    check("mypy", {int(line) for _, line in reported}, done.stdout)


@pytest.mark.parametrize("mode", ["standard", "strict"])
def test_pyright_reports_exactly_the_planted_mistakes(tmp_path: Path, mode: str) -> None:
    snippet = tmp_path / _SNIPPET.name
    snippet.write_text(f"{_SNIPPET.read_text()}# pyright: {mode}\n")
    options = ["--outputjson", "--pythonpath", sys.executable]
    done = run([npm_command("pyright"), *options, snippet])
    diagnostics = json.loads(done.stdout)["generalDiagnostics"]
    errors = [each for each in diagnostics if each["severity"] == "error"]
    reported = {each["range"]["start"]["line"] + 1 for each in errors}
    check("pyright", reported, "\n".join(each["message"] for each in errors))


@pytest.mark.parametrize(
    ("checker", "options"),
    [
        ("pyrefly", ["--preset=default", "--output-format=min-text", "--python-interpreter-path"]),
        ("ty", ["--output-format=concise", "--python"]),
    ],
)
def test_others_report_what_the_documentation_says(checker: str, options: list[str]) -> None:
    done = run([pip_command(checker), "check", *options, sys.executable, _SNIPPET])
    reported = re.findall(rf"^(?: *ERROR )?\S*{_SNIPPET.name}:(\d+):", done.stdout, re.MULTILINE)
    check(checker, {int(line) for line in reported}, done.stdout + done.stderr)


def test_an_editor_shows_signatures_and_docstrings_of_remote_methods() -> None:
    text = """
import courier
import launchpad_lite as lp
from tests.typing.planted_mistakes import Range


def run(client: Range, pool: courier.Pool[Range]) -> None:
    client.[1]produce([2])
    future = courier.[3]submit(client.[4]produce, [5])
    [6]future.[7]result()
    courier.[8]call_aio(client.produce)
    pool.by_key(1).[9]produce()
    lp.Program("p").add_node(lp.CourierNode(Range, 0, 1)).dereference().[10]produce()
"""
    produce = "(count: int = 1) -> list[int]", "Returns the first numbers."
    submit = "-> Future[R@submit]", "Calls `client.m` without waiting"
    with LanguageServer(text) as editor:
        for place in (1, 4, 9, 10):
            assert_shows(editor.hover(place), *produce)
            assert_shows(editor.completion(place, "produce"), *produce)
        assert_shows(editor.hover(3), *submit)
        assert_shows(editor.hover(6), "future: Future[list[int]]")
        assert_shows(editor.completion(7, "result"), "-> list[int]")
        assert_shows(editor.hover(8), "-> Coroutine[Any, Any, R@call_aio]", "`client.aio.m(...)`")
        assert_shows(editor.signature(2), *produce)
        assert_shows(editor.signature(5), "/, count: int = 1) -> Future[R@submit]", submit[1])


def assert_shows(shown: str, *parts: str) -> None:
    for part in parts:
        assert part in shown


class LanguageServer:
    """An editor's end of pyright's language server, with one open file."""

    def __init__(self, text: str) -> None:
        """Starts it; `[3]` in the text names a place, and is no part of the file."""
        self._places: dict[int, dict[str, int]] = {}
        lines = []
        for number, line in enumerate(text.splitlines()):
            while place := re.search(r"\[(\d+)\]", line):
                self._places[int(place[1])] = {"line": number, "character": place.start()}
                line = line.replace(place[0], "", 1)
            lines.append(line)
        self._file = {"uri": _SNIPPET.with_name("opened.py").as_uri()}
        self._text = "\n".join(lines)
        self._requests = 0
        self._process = subprocess.Popen(
            [npm_command("pyright-langserver"), "--stdio"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout

    def __enter__(self) -> "LanguageServer":
        folder = {"uri": _ROOT.as_uri(), "name": "root"}
        plain = {"documentationFormat": ["plaintext"]}
        document = {
            "hover": {"contentFormat": ["plaintext"]},
            "completion": {"completionItem": plain},
            "signatureHelp": {"signatureInformation": plain},
        }
        abilities = {"workspace": {"configuration": True}, "textDocument": document}
        self._ask(
            "initialize",
            processId=None,
            workspaceFolders=[folder],
            capabilities=abilities,
            **folder,
        )
        self._send(method="initialized", params={})
        opened = {**self._file, "languageId": "python", "version": 1, "text": self._text}
        self._send(method="textDocument/didOpen", params={"textDocument": opened})
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._input.close()
        self._output.close()

    def hover(self, place: int) -> str:
        return str(self._ask_at(place, "hover")["contents"]["value"])

    def completion(self, place: int, label: str) -> str:
        found = self._ask_at(place, "completion")["items"]
        (item,) = [each for each in found if each["label"] == label]
        return str(self._ask("completionItem/resolve", **item)["documentation"]["value"])

    def signature(self, place: int) -> str:
        first = self._ask_at(place, "signatureHelp")["signatures"][0]
        return f"{first['label']}\n{first['documentation']['value']}"

    def _ask_at(self, place: int, what: str) -> Any:
        position = {"textDocument": self._file, "position": self._places[place]}
        return self._ask(f"textDocument/{what}", **position)

    def _ask(self, method: str, **params: Any) -> Any:
        self._requests += 1
        self._send(id=self._requests, method=method, params=params)
        for message in self._messages():
            if "method" not in message and message.get("id") == self._requests:
                return message["result"]
            if message.get("method") == "workspace/configuration":
                python = {"pythonPath": sys.executable}
                sections = [each.get("section") for each in message["params"]["items"]]
                answer = [python if section == "python" else {} for section in sections]
                self._send(id=message["id"], result=answer)
            elif "id" in message:
                self._send(id=message["id"], result=None)
        raise AssertionError("the language server has ended")

    def _send(self, **message: Any) -> None:
        content = json.dumps({"jsonrpc": "2.0", **message}).encode()
        self._input.write(b"Content-Length: %d\r\n\r\n%s" % (len(content), content))
        self._input.flush()

    def _messages(self) -> Iterator[dict[str, Any]]:
        while head := b"".join(iter(self._output.readline, b"\r\n")):
            size = re.search(rb"Content-Length: (\d+)", head)
            assert size is not None
            yield json.loads(self._output.read(int(size[1])))


def npm_command(name: str) -> Path:
    package = f"pyright@{row_of('pyright').version}"
    folder = _CACHE / package
    npm = shutil.which("npm") or "npm"
    install = [npm, "install", "--no-audit", "--no-fund", "--prefix", str(folder), package]
    return installed_command(folder / "node_modules" / ".bin" / name, install)


def pip_command(name: str) -> Path:
    package = f"{name}=={row_of(name).version}"
    folder = _CACHE / package
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder), package]
    return installed_command(folder / "bin" / name, install)


def installed_command(command: Path, install: list[str]) -> Path:
    """Returns a command; CI installs it, other machines need not have it."""
    if not command.exists() and os.environ.get("CI") == "true":
        done = run(install)
        assert done.returncode == 0, done.stdout + done.stderr
    if not command.exists():
        pytest.skip(f"needs {command.name}: {' '.join(install)}")
    return command


def run(command: Sequence["str | Path"]) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=280)
