"""`python -m launchpad_lite.launch`: run, plan or draw a program that is named on the command line."""

import contextlib
import importlib
import importlib.util
import inspect
import sys
import types
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from absl import flags

from launchpad_lite._flags import TERMINATION_NOTICE_SECS, parse_known
from launchpad_lite._launch import launch, plan
from launchpad_lite._program import Program
from launchpad_lite._render import render_mermaid, render_svg
from launchpad_lite.errors import LaunchError, LaunchpadError, NodeFailedError, ProgramPathError
from launchpad_lite.launching import installed_launchers

_USAGE = """\
usage: python -m launchpad_lite.launch [--launcher=NAME] [COMMAND] PROGRAM [--ARGUMENT=VALUE ...]

PROGRAM is module:function or path/to/file.py:function; the function returns an lp.Program
(make_program, if none is named). Its arguments, and the flags its module defines, may follow.

commands:
  run      start the program and wait for its end (the default)
  plan     show what would start where
  render   draw the graph; --output=graph.svg or --output=graph.mmd (Mermaid; to the screen
           without --output)

options:
  --launcher=NAME                     {launchers}
  --lp_restart=WHEN                   never, on_failure or always; or GROUP=WHEN,GROUP=WHEN
  --lp_checkpoints=FOLDER             where nodes keep their state that can save and restore it
  --lp_termination_notice_secs=N      seconds nodes have to end after they were asked ({notice:g})
"""
_UNIONS = (types.UnionType, typing.Union)
_COMMANDS = ("run", "plan", "render")
#: How a command line ends that cannot be understood; as argparse does.
_USAGE_ERROR = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line and returns the exit code.

    Args:
        argv: Arguments without the program's name; by default those of this process.
    """
    try:
        return _run(list(sys.argv[1:] if argv is None else argv))
    except (NodeFailedError, LaunchError) as error:
        print(f"\n{error}", file=sys.stderr)  # noqa: T201 - what a command line is for
        return 1
    except (LaunchpadError, flags.Error) as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        if error.__cause__ is not None and isinstance(error, ProgramPathError):
            print(f"caused by: {error.__cause__!r}", file=sys.stderr)  # noqa: T201
        return _USAGE_ERROR


def _run(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_usage())  # noqa: T201
        return 0 if arguments else _USAGE_ERROR
    _, *rest = parse_known(["launch", *arguments])
    command = rest.pop(0) if rest and rest[0] in _COMMANDS else "run"
    output = _take_option(rest, "output") if command == "render" else None
    path = _take_path(rest)
    program = make_program(path, rest)
    if command == "plan":
        print(plan(program))  # noqa: T201
    elif command == "render":
        _render(program, output)
    else:
        launch(program).wait()
    return 0


def _usage() -> str:
    return _USAGE.format(
        launchers=", ".join(installed_launchers()), notice=TERMINATION_NOTICE_SECS.default
    )


def _take_path(rest: list[str]) -> str:
    for index, argument in enumerate(rest):
        if not argument.startswith("-"):
            return rest.pop(index)
    raise ProgramPathError(f"no PROGRAM is named.\n\n{_usage()}")


def _take_option(rest: list[str], name: str) -> str | None:
    for index, argument in enumerate(rest):
        if argument.startswith(f"--{name}="):
            return rest.pop(index).partition("=")[2]
    return None


def _render(program: Program, output: str | None) -> None:
    ready = plan(program)
    if output is None:
        print(render_mermaid(ready), end="")  # noqa: T201
        return
    text = render_svg(ready) if output.endswith(".svg") else render_mermaid(ready)
    Path(output).write_text(text)


def make_program(path: str, arguments: Sequence[str]) -> Program:
    """Imports and calls the function that makes a program.

    Args:
        path: `module:function` or `path/to/file.py:function`.
        arguments: `--name=value` for flags that the module defines and for arguments of the
            function, converted to the types of its annotations or defaults.

    Raises:
        ProgramPathError: It cannot be imported, found or called.
    """
    place, _, name = path.partition(":")
    module = _import(place)
    function = getattr(module, name or "make_program", None)
    if isinstance(function, Program):
        return function
    if not callable(function):
        candidates = ", ".join(_factories(module)) or "none"
        raise ProgramPathError(
            f"{place!r} has no function {name or 'make_program'!r}; it has: {candidates}"
        )
    # The module has defined its flags by now.
    _, *rest = parse_known(["launch", *arguments])
    keywords = _keyword_arguments(function, rest)
    try:
        inspect.signature(function).bind(**keywords)
    except TypeError as error:
        raise ProgramPathError(f"{path!r}: {error}; give it as --NAME=VALUE") from None
    program = function(**keywords)
    if not isinstance(program, Program):
        raise ProgramPathError(f"{path!r} returned {program!r} instead of an lp.Program")
    return program


def _import(place: str) -> Any:
    if place.endswith(".py"):
        return _import_file(Path(place))
    # As `python -m` does: programs stand beside the place where one works.
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(place)
    except ImportError as error:
        raise ProgramPathError(
            f"cannot import {place!r}: {error}. It is searched in {Path.cwd()} and where Python "
            "finds installed packages"
        ) from error
    except Exception as error:
        raise ProgramPathError(f"importing {place!r} failed: {error!r}") from error


def _import_file(file: Path) -> Any:
    if not file.is_file():
        raise ProgramPathError(f"there is no file {str(file)!r}")
    # Workers import it by the same name, so its folder becomes part of the path.
    sys.path.insert(0, str(file.resolve().parent))
    module = _import(file.stem)
    if Path(getattr(module, "__file__", None) or "").resolve() != file.resolve():
        raise ProgramPathError(
            f"{str(file)!r} cannot be imported: the module {file.stem!r} is {module!r}; give the "
            "file another name"
        )
    return module


def _factories(module: Any) -> list[str]:
    return [
        name
        for name, value in vars(module).items()
        if inspect.isfunction(value)
        and value.__module__ == module.__name__
        and not name.startswith("_")
    ]


def _keyword_arguments(function: Callable[..., Any], arguments: list[str]) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters
    hints: dict[str, Any] = {}
    with contextlib.suppress(Exception):  # annotations that cannot be evaluated help nobody
        hints = typing.get_type_hints(function)
    keywords: dict[str, Any] = {}
    for argument in arguments:
        name, _, text = argument.removeprefix("--").partition("=")
        name = name.replace("-", "_")
        if not argument.startswith("--") or name not in parameters:
            _refuse(function, argument, list(parameters))
        kind = hints.get(name, type(parameters[name].default))
        keywords[name] = _convert(argument, text, kind)
    return keywords


def _refuse(function: Callable[..., Any], argument: str, known: list[str]) -> NoReturn:
    names = ", ".join(f"--{name}" for name in known) or "no arguments"
    raise ProgramPathError(f"unknown argument {argument!r}; {function.__name__} takes {names}")


def _convert(argument: str, text: str, kind: Any) -> Any:
    kinds = typing.get_args(kind) if typing.get_origin(kind) in _UNIONS else (kind,)
    if bool in kinds:
        if text.lower() not in ("", "true", "1", "yes", "false", "0", "no"):
            raise ProgramPathError(f"{argument!r}: expected true or false")
        return text.lower() in ("", "true", "1", "yes")
    for known in (int, float, Path):
        if known in kinds:
            try:
                return known(text)
            except ValueError:
                raise ProgramPathError(f"{argument!r}: expected {known.__name__}") from None
    return text
