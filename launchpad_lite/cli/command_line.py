"""`python -m launchpad_lite.launch`: run, plan or draw a program that is named on the command line."""

import ast
import importlib
import importlib.util
import inspect
import operator
import os
import signal
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from absl.flags import FLAGS, Error as FlagError

from courier.lowlevel import signature_of
from launchpad_lite import errors
from launchpad_lite._version import __version__
from launchpad_lite.cli import _run_commands as of_runs
from launchpad_lite.cli._doctor import diagnose
from launchpad_lite.graph.program import Program
from launchpad_lite.launching import (
    Launcher,
    LaunchOptions,
    LaunchPlan,
    installed_launchers,
    load_launcher,
    options_of,
)
from launchpad_lite.launching.launch import find_launcher, launch, plan
from launchpad_lite.launching.registry import Inspector
from launchpad_lite.parts.arguments import convert, kinds_of
from launchpad_lite.parts.private_files import make_folder, write_private
from launchpad_lite.parts.settings import nearest
from launchpad_lite.planning.render import render_mermaid, render_svg
from launchpad_lite.process import flags
from launchpad_lite.process.script import importing
from launchpad_lite.worker.checkpoints import CheckpointStore

_USAGE = """\
usage: python -m launchpad_lite.launch [--launcher=NAME] [--OPTION=VALUE ...] [COMMAND]
           PROGRAM [--ARGUMENT=VALUE ...]

PROGRAM is module:function or path/to/file.py:function; the function returns an lp.Program
(make_program, if none is named). Its arguments, and the flags its module defines, may follow. What
stands before it may be options of the launcher, as in --launcher=ssh --hosts=h1,h2.

commands:
  run      start the program and wait for its end (the default)
  plan     show what would start where
  render   draw the graph; --output=graph.svg or --output=graph.mmd (Mermaid; to the screen
           without --output)
  emit     write what the launcher would hand to others to --output=FOLDER, or -o FOLDER: scripts,
           commands, objects. The launcher may come first: emit kubernetes PROGRAM -o FOLDER
  restore  make an older checkpoint of a node the newest, by a copy, for the next start. In place of
           PROGRAM stands its folder: restore runs/1/learner/0/00000007
  doctor   check this machine, and hosts that ssh reaches: doctor h1 user@h2; with --launcher=NAME
           before it, what that needs. --json prints JSON

commands for programs of yours that run on this machine: [PROGRAM [NODE ...]], where PROGRAM is the name
of the program or the number of the process that launched it (the newest, if none is named; `stop` asks
which, if there are several), and NODE is label or label[replica]:
  status   show how its nodes are; without a name, list all programs
  logs     show what its nodes printed; -f: go on until it ends
  stop     stop it in order, and wait for its end
  stack    show where the threads of its nodes are now
  why      show who waits for whom, and why it does not go on
  report   write what a bug report needs to --output=FILE.zip; in place of PROGRAM may stand the
           folder of a run
  attach   open a debugger in one node: look at the variables of its threads, which run on
  profile  show where threads spend their time; --seconds=5; --output=FILE (.svg, .html,
           .speedscope.json, .txt) writes a flame graph, for speedscope, or folded stacks
  trace    write the newest calls of its nodes to --output=FILE (.json, .json.gz), for
           https://ui.perfetto.dev; --seconds=N: those of the last seconds
  top      show what its nodes do, as a table that is renewed; with the extra `top`, keys show more
  dashboard  serve a page of it on this machine, at --port=N or any; the folder of a run that has ended
           may stand in place of PROGRAM

status, logs, stack and why (and plan) print JSON with --json: see docs/command_line.md.

The same for programs that outlive their launcher: name the launcher and the run (--launcher=slurm: the
number of the job or the folder of the run; --launcher=kubernetes: the name of the run).

A script of the original Launchpad, which says `import launchpad`, runs without a change:

  [--launcher=NAME] [--OPTION=VALUE ...] --compat SCRIPT [ARGUMENT ...]      (or -m MODULE)

PROGRAM --help shows its arguments; --version shows that of this package.

launchers: {launchers}

{flags}
"""
#: Arguments of `launch` that the command line gives.
_NOT_OF_MAIN = {"programs", "launcher", "launch_type", "launcher_options"}
#: Flags that override the argument of `lp.main`.
_FLAG_OF: dict[str, flags.Flag[Any]] = {
    "checkpoints": flags.CHECKPOINTS,
    "log_dir": flags.LOG_DIR,
    "notice_s": flags.TERMINATION_NOTICE_SECS,
    "restart": flags.RESTART,
    "seed": flags.SEED,
}
_COMMANDS = ("run", "plan", "render", "emit")
_RESTORE = "restore"
_DOCTOR = "doctor"
_WITHOUT_PROGRAM = (*of_runs.COMMANDS, _RESTORE, _DOCTOR)
_COMPAT = "--compat"
#: Exit code after a wrong command line, as of argparse.
_USAGE_ERROR = 2
#: Seconds in which a program that is found again notices that it has ended already.
_LOOK_S = 1.0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line, by default that of this process, and returns the exit code."""
    return _guarded(lambda: _run(list(sys.argv[1:] if argv is None else argv)))


def run_script(make_program: Callable[..., Program], **options: Any) -> NoReturn:
    """Runs a script as `python -m launchpad_lite.launch` would run its program, and exits.

    The command line may hold flags (ours and those that the script defines with absl), arguments of
    `make_program` by name (converted to its annotations or defaults), options of the launcher, and a
    command, first or after `--name=value`: `run` (the default), `plan`, `render`, `emit`, one for
    programs that run already (`status`, `logs`, `stack`, `why`, `stop`, `profile`, `trace`, `attach`,
    `report`, `top`, `dashboard`), `restore` or `doctor`. It refuses unknown arguments, and answers `--help` and
    `--version`. The exit code is the program's.

    Args:
        make_program: Returns the program.
        **options: Arguments of `lp.launch`: restart, liveness, checkpoints, resources, processes, ...

    Raises:
        SystemExit: Always.
        TypeError: `lp.launch` does not take such options.

    Example:
        if __name__ == "__main__":
            lp.main(make_program, restart="on_failure")
    """
    known = set(inspect.signature(launch).parameters) - _NOT_OF_MAIN
    if unknown := sorted(set(options) - known):
        raise TypeError(
            f"lp.main: unknown option {unknown[0]}=; known are {', '.join(sorted(known))}"
        )
    sys.exit(_guarded(lambda: _run_script(make_program, options, sys.argv[1:])))


def _guarded(run: Callable[[], int]) -> int:
    """Prints errors; returns the exit code."""
    try:
        code = run()
        print(end="", flush=True)  # noqa: T201 - a service may have no sys.stdout to flush
        return code
    except (errors.NodeFailedError, errors.LaunchError) as error:
        print(f"\n{error}", file=sys.stderr)  # noqa: T201 - what a command line is for
        return 1
    except (errors.LaunchpadError, FlagError) as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        if error.__cause__ is not None and isinstance(error, errors.ProgramPathError):
            print(f"caused by: {error.__cause__!r}", file=sys.stderr)  # noqa: T201
        return _USAGE_ERROR
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:
        # `logs -f | head` has read enough. Python flushes the output once more when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


def _run(arguments: list[str]) -> int:
    if not arguments or arguments[0] in (*flags.HELP, "help"):
        print(_usage())  # noqa: T201
        return 0 if arguments else _USAGE_ERROR
    if _COMPAT in arguments:
        _, *before = flags.parse_known(["launch", *arguments[: arguments.index(_COMPAT)]])
        if _first_word(before) == len(before):  # after a program, it is that program's
            _run_original(arguments, before)
        FLAGS.unparse_flags()
    _, *rest = flags.parse_known(["launch", *arguments])
    if _is_answered(rest):
        return 0
    command = _take_command(rest)
    output = _take_option(rest, "output") if command in ("render", "emit") else None
    if command in _WITHOUT_PROGRAM:
        return _do_without_program(command, rest)
    launcher, options = _take_launcher(rest, command)
    path = _take_path(rest)
    with importing("python -m launchpad_lite.launch"):
        found = find_program(path)
        if flags.HELP.intersection(rest):
            print(_describe(path, found, options))  # noqa: T201
            return 0
        if not isinstance(found, Program) and _gives_more(path):
            _run_named_script(path, command, launcher.name, arguments)
        command = _with_json(command, rest, found)
        program = make_program(found, path, rest, options)
    return _do(command, program, launcher, output, {})


def _run_original(arguments: list[str], options: Sequence[str]) -> NoReturn:
    """Becomes a script that finds our package `launchpad`; `options` before `--compat` are no flags."""
    place = arguments.index(_COMPAT)
    before, rest = arguments[:place], arguments[place + 1 :]
    count = 2 if rest[:1] == ["-m"] else 1
    script = rest[:count]
    known = options_of(flags.chosen_launcher())
    for option in options:
        if option.removeprefix("--").partition("=")[0].replace("-", "_") not in known:
            _refuse(_COMPAT, option, [], [*known])
    if len(script) < count or (count == 1 and not Path(script[0]).is_file()):
        raise errors.ProgramPathError(
            f"{_COMPAT} is followed by a script, or -m and a module; {' '.join(script)!r} is none"
        )
    environment = dict(os.environ)
    package = Path(__file__).parents[1]
    # In a wheel, and beside the package in a copy of the repository.
    places = (package / "compat", package.parent / "compat")
    folder = next((each for each in places if (each / "launchpad").is_dir()), None)
    # First, so that it finds ours, which refuses to run beside the original.
    if folder is not None:
        paths = [str(folder), *filter(None, [environment.get("PYTHONPATH")])]
        environment["PYTHONPATH"] = os.pathsep.join(paths)
    elif importlib.util.find_spec("launchpad") is None:
        raise errors.MissingExtraError(
            "there is no package launchpad here: pip install launchpad-lite-compat"
        )
    given = [
        f"--{flags.LAUNCHER_OPTION.name}={each.removeprefix('--')}" if each in options else each
        for each in before
    ]
    command = [sys.executable, *script, *given, *rest[count:]]
    os.execve(sys.executable, command, environment)  # noqa: S606 - needs no shell


def _run_script(
    function: Callable[..., Program], settings: Mapping[str, Any], arguments: list[str]
) -> int:
    _, *rest = flags.parse_known([sys.argv[0], *arguments])
    if _is_answered(rest):
        return 0
    # A word after `--name` may be its value, unless that is true or false.
    own = signature_of(function).parameters
    bare = [each[2:].replace("-", "_") for each in rest[: _first_word(rest)] if "=" not in each]
    has_command = all(each in own and bool in kinds_of(function, each) for each in bare)
    command = _take_command(rest) if has_command else "run"
    if command in _WITHOUT_PROGRAM:
        return _do_without_program(command, rest)
    output = _take_option(rest, "output") if command in ("render", "emit") else None
    launcher, options = _take_launcher(rest, command, own)
    if flags.HELP.intersection(rest):
        print(_describe(f"{Path(sys.argv[0]).name} [COMMAND]", function, options))  # noqa: T201
        commands = ", ".join((*_COMMANDS, *_WITHOUT_PROGRAM))
        print(f"\ncommands (python -m launchpad_lite.launch --help describes them): {commands}")  # noqa: T201
        return 0
    command = _with_json(command, rest, function)
    with importing("lp.main"):
        program = make_program(function, function.__name__, rest, options)
    return _do(command, program, launcher, output, settings)


def _with_json(command: str, rest: list[str], function: Callable[..., Program] | Program) -> str:
    """Returns `json` for `plan --json`, unless that is an argument of the program."""
    own = () if isinstance(function, Program) else signature_of(function).parameters
    if command != "plan" or "--json" not in rest or "json" in own:
        return command
    rest.remove("--json")
    return "json"


def _is_answered(rest: Sequence[str]) -> bool:
    """Answers `--version` and the like; returns whether it did."""
    if "--version" in rest:
        print(f"launchpad-lite {__version__}")  # noqa: T201
    return "--version" in rest


def _describe(
    place: str, function: Callable[..., Program] | Program, options: Sequence[str]
) -> str:
    """Returns the help of a program: its arguments and flags."""
    parts = [f"usage: {place} [--ARGUMENT=VALUE ...]"]
    if not isinstance(function, Program):
        if text := inspect.getdoc(function):
            parts.append(text)
        lines = []
        for name, parameter in signature_of(function).parameters.items():
            kind = parameter.annotation
            shown = "" if kind is parameter.empty else f" ({inspect.formatannotation(kind)})"
            value = "..." if parameter.default is parameter.empty else parameter.default
            lines.append(f"  --{name}={value}{shown}")
        if lines:
            parts.append("\n".join([f"arguments of {function.__name__}:", *lines]))
    parts.append(flags.describe_flags())
    if options:
        named = ", ".join(f"--{name}" for name in options)
        parts.append(f"options of the launcher {flags.chosen_launcher()}: {named}")
    return "\n\n".join(parts)


def _do(
    command: str,
    program: Program,
    launcher: Launcher,
    output: str | None,
    settings: Mapping[str, Any],
) -> int:
    """Runs a command for a program; `settings`: arguments of `launch`, unless a flag gives them."""
    flags_given = {setting for setting, flag in _FLAG_OF.items() if flag.present}
    settings = {k: v for k, v in settings.items() if k not in flags_given}
    if command == "run":
        launch(program, launcher, **settings).wait()
        return 0
    planned = inspect.signature(plan).parameters
    ready = plan(program, launcher, **{k: v for k, v in settings.items() if k in planned})
    if command == "json":
        of_runs.print_json(**ready.as_json())
    elif command == "plan":
        print(ready)  # noqa: T201
    elif command == "render":
        _render(ready, output)
    else:
        _emit(ready, launcher, output)
    return 0


def _gives_more(path: str) -> bool:
    """Returns whether an imported script gives `lp.main` more than its function, as restart=..."""
    place, _, name = path.partition(":")
    module: Any = sys.modules[Path(place).stem if place.endswith(".py") else place]
    # It may have no source, or call undefined names.
    with suppress(OSError, TypeError, AttributeError):
        for call in ast.walk(ast.parse(inspect.getsource(module))):
            if isinstance(call, ast.Call) and call.keywords:
                if [ast.unparse(each) for each in call.args] == [name or "make_program"]:
                    return operator.attrgetter(ast.unparse(call.func))(module) is run_script
    return False


def _run_named_script(path: str, command: str, launcher: str, rest: list[str]) -> NoReturn:
    """Becomes a script whose `lp.main` runs this command line, with all its arguments."""
    place = path.partition(":")[0]
    script = [place] if place.endswith(".py") else ["-m", place]
    before, after = rest[: rest.index(path)], rest[rest.index(path) + 1 :]
    # For `emit`, the launcher may be a word.
    words = {command} if flags.launcher_flag().value else {command, launcher}
    given = [f"--launcher={launcher}", *(each for each in before if each not in words), *after]
    os.execv(sys.executable, [sys.executable, *script, command, *given])  # noqa: S606 - needs no shell


def _do_without_program(command: str, rest: list[str]) -> int:
    if flags.HELP.intersection(rest):
        print(_usage())  # noqa: T201
        return 0
    if command == _RESTORE:
        return _restore_checkpoint(rest)
    return _diagnose(rest) if command == _DOCTOR else _ask_run(command, rest)


def _ask_run(command: str, rest: list[str]) -> int:
    """Runs a command for a running program; if a launcher is named, for one that it finds again."""
    known = of_runs.COMMANDS[command]
    given: dict[str, Any] = {}
    for name in known:
        kind = type(of_runs.AskOptions._field_defaults[name])
        if kind is not bool and (text := _take_option(rest, name)) is not None:
            given[name] = _convert(f"--{name}={text}", text, (kind,))
        elif kind is bool and (found := {f"--{name}", f"-{name[0]}"}.intersection(rest)):
            given[name] = True
            rest = [word for word in rest if word not in found]
    asked = of_runs.AskOptions(**given)
    has_launcher = flags.launcher_flag().value is not None
    launcher, options = _take_launcher(rest, command)
    words = [word for word in rest if not word.startswith("-")]
    if unknown := [word for word in rest if word.startswith("-")]:
        _refuse(command, unknown[0], known, options)
    if has_launcher and type(launcher).attach is not Launcher.attach:
        reference, *nodes = [_take_path(words), *words]
        running = launcher.attach(reference)
        inspector = Inspector(running, _LOOK_S)
        of_runs.ask(command, inspector, running.log_dir, nodes, asked)
    else:
        of_runs.ask_listed(command, words, asked)
    return 0


def _restore_checkpoint(rest: list[str]) -> int:
    folder = Path(_take_path(rest)).absolute()
    if rest:
        _refuse(_RESTORE, rest[0], [], [])
    newest = CheckpointStore(folder.parent, keep=1).renew(folder.name)
    print(f"{newest} is the newest checkpoint now, a copy of {folder.name}")  # noqa: T201
    return 0


def _diagnose(rest: list[str]) -> int:
    """Checks this machine, and hosts: over SSH, unless a launcher is named."""
    as_json = "--json" in rest
    hosts = [word for word in rest if not word.startswith("-")]
    rest = [word for word in rest if word not in ("--json", *hosts)]
    if hosts:
        rest.append(f"--hosts={','.join(hosts)}")
    name = flags.launcher_flag().value or (
        "ssh" if hosts or flags.HOSTS.value is not None else None
    )
    launcher, options = _take_launcher(rest, _DOCTOR, name=name) if name else (None, ())
    if rest:
        _refuse(_DOCTOR, rest[0], ["json"], options)
    return diagnose(launcher, as_json=as_json)


def _take_command(rest: list[str]) -> str:
    index = _first_word(rest)
    if index < len(rest) and rest[index] in (*_COMMANDS, *_WITHOUT_PROGRAM):
        return rest.pop(index)
    return "run"


def _first_word(rest: Sequence[str]) -> int:
    words = (index for index, argument in enumerate(rest) if not argument.startswith("-"))
    return next(words, len(rest))


def _take_launcher(
    rest: list[str], command: str, without: Collection[str] = (), *, name: str | None = None
) -> tuple[Launcher, Sequence[str]]:
    """Makes the launcher, with its options from before the program; returns the names of all.

    Names in `without` mean something else.
    """
    if command == "emit":
        name = _take_name(rest)
    name = name or flags.chosen_launcher()
    maker = load_launcher(name)
    known = {option: each for option, each in options_of(name).items() if option not in without}
    options: dict[str, Any] = {}
    for argument in rest[: _first_word(rest)]:
        option, _, text = argument.removeprefix("--").partition("=")
        option = option.replace("-", "_")
        if argument.startswith("--") and option in known:
            rest.remove(argument)
            options[option] = _convert(argument, text, kinds_of(maker, option))
    try:
        launcher = find_launcher(name, options)
    except (TypeError, ValueError) as error:
        raise errors.ProgramPathError(f"--launcher={name}: {error}") from error
    # Removed, because `launch` refuses options of a launcher that is made already.
    FLAGS[flags.LAUNCHER_OPTION.name].unparse()
    return launcher, [*known]


def _take_name(rest: list[str]) -> str | None:
    """Returns the launcher that stands before the program, if there is one."""
    words = [argument for argument in rest if not argument.startswith("-")]
    if len(words) < 2 or words[0] not in installed_launchers():
        return None
    rest.remove(words[0])
    return words[0]


def _usage() -> str:
    return _USAGE.format(launchers=", ".join(installed_launchers()), flags=flags.describe_flags())


def _take_path(rest: list[str]) -> str:
    if (index := _first_word(rest)) < len(rest):
        return rest.pop(index)
    raise errors.ProgramPathError(f"no PROGRAM is named.\n\n{_usage()}")


def _take_option(rest: list[str], name: str) -> str | None:
    """Takes `--name=VALUE`, or `-n VALUE` as in other tools."""
    for index, argument in enumerate(rest):
        if argument.startswith(f"--{name}="):
            return rest.pop(index).partition("=")[2]
        if argument == f"-{name[0]}" and index + 1 < len(rest):
            del rest[index]
            return rest.pop(index)
    return None


def _render(ready: LaunchPlan, output: str | None) -> None:
    if output is None:
        print(render_mermaid(ready), end="")  # noqa: T201
        return
    kinds = {".svg": render_svg, ".mmd": render_mermaid}
    draw = kinds.get(Path(output).suffix)
    if draw is None:
        raise errors.ProgramPathError(
            f"--output={output}: name a file that ends in {' or '.join(kinds)}"
        )
    Path(output).write_text(draw(ready))


def _emit(ready: LaunchPlan, launcher: Launcher, output: str | None) -> None:
    if output is None:
        raise errors.ProgramPathError("emit writes files; say where: --output=FOLDER")
    folder = Path(output).absolute()
    files = launcher.emit(ready, LaunchOptions(flags.TERMINATION_NOTICE_SECS.value, folder))
    # Work of nodes may contain secrets, so no other user may read or replace it.
    for name, content in files.items():
        path = folder / name
        try:
            make_folder(path.parent)
            write_private(path, content)
        except OSError as error:
            raise errors.LaunchError(
                f"cannot write {path}: {error}; name another --output="
            ) from error
        print(path)  # noqa: T201


def find_program(path: str) -> Callable[..., Any] | Program:
    """Returns the function, or the program, at `module:function` or `path/to/file.py:function`."""
    place, _, name = path.partition(":")
    module = _import(place)
    found = getattr(module, name or "make_program", None)
    if not isinstance(found, Program) and not callable(found):
        functions = {key: each for key, each in vars(module).items() if inspect.isfunction(each)}
        own = [key for key, each in functions.items() if each.__module__ == module.__name__]
        public = ", ".join(key for key in own if not key.startswith("_")) or "none"
        raise errors.ProgramPathError(
            f"{place!r} has no function {name or 'make_program'!r}; it has: {public}"
        )
    return found


def make_program(
    function: Callable[..., Any] | Program,
    place: str,
    arguments: Sequence[str],
    options: Sequence[str],
) -> Program:
    """Calls the function that makes a program, if it is not a program already.

    `place` names the function in errors. Arguments are for flags that its module defines, and its
    own. `options` are names of the launcher's options, in case one is misspelt.
    """
    # The module has defined its flags by now.
    _, *rest = flags.parse_known(["launch", *arguments])
    if isinstance(function, Program):
        if rest:
            _refuse(place, rest[0], [], options)
        return function
    keywords = _keyword_arguments(function, rest, options)
    try:
        signature_of(function).bind(**keywords)
    except TypeError as error:
        raise errors.ProgramPathError(f"{place!r}: {error}; give it as --NAME=VALUE") from None
    program = function(**keywords)
    if not isinstance(program, Program):
        raise errors.ProgramPathError(f"{place!r} returned {program!r} instead of an lp.Program")
    return program


def _import(place: str) -> Any:
    if place.endswith(".py"):
        return _import_file(Path(place))
    # As `python -m` does: programs are in the working directory.
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(place)
    except ImportError as error:
        raise errors.ProgramPathError(
            f"cannot import {place!r}: {error}. It is searched in {Path.cwd()} and where Python "
            "finds installed packages"
        ) from error
    except errors.LaunchError:
        raise
    except Exception as error:
        raise errors.ProgramPathError(f"importing {place!r} failed: {error!r}") from error


def _import_file(file: Path) -> Any:
    if not file.is_file():
        raise errors.ProgramPathError(f"there is no file {str(file)!r}")
    # Workers import it by the same name, so its folder becomes part of the path.
    sys.path.insert(0, str(file.resolve().parent))
    module = _import(file.stem)
    if Path(getattr(module, "__file__", None) or "").resolve() != file.resolve():
        raise errors.ProgramPathError(
            f"{str(file)!r} cannot be imported: the module {file.stem!r} is {module!r}; give the "
            "file another name"
        )
    return module


def _keyword_arguments(
    function: Callable[..., Any], arguments: list[str], options: Sequence[str]
) -> dict[str, Any]:
    parameters = signature_of(function).parameters
    keywords: dict[str, Any] = {}
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        name, equals, text = argument.removeprefix("--").partition("=")
        name = name.replace("-", "_")
        if not argument.startswith("--") or name not in parameters:
            _refuse(function.__name__, argument, list(parameters), options)
        kinds = kinds_of(function, name)
        if not equals and bool not in kinds:
            if not rest or rest[0].startswith("--"):
                raise errors.ProgramPathError(f"{argument!r} needs a value: {argument}=VALUE")
            text = rest.pop(0)
        keywords[name] = _convert(argument, text, kinds)
    return keywords


def _convert(argument: str, text: str, kinds: Collection[Any]) -> Any:
    try:
        return convert(text, kinds)
    except ValueError as error:
        raise errors.ProgramPathError(f"{argument!r}: {error}") from None


def _refuse(taker: str, argument: str, known: Sequence[str], options: Sequence[str]) -> NoReturn:
    names = ", ".join(f"--{name}" for name in known) or "no options"
    name = argument.removeprefix("--").partition("=")[0]
    near = nearest(name, [*known, *options, *flags.flag_names()])
    also = ", ".join(f"--{name}" for name in options)
    raise errors.ProgramPathError(
        f"unknown argument {argument!r}"
        + (f" (did you mean --{near}?)" if near else "")
        + f"; {taker} takes {names}"
        + (f". The launcher takes, before PROGRAM or RUN: {also}" if also else "")
    )
