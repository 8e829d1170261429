"""Command-line flags, which absl gets when it is imported: that is slow, and many do without."""

import logging
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import FrameType, ModuleType
from typing import Any, Generic, TypeVar

from courier.lowlevel import loaded_module
from launchpad_lite.errors import LaunchError
from launchpad_lite.parts.settings import nearest

_LOGGER = logging.getLogger(__name__)
_ABSL = "absl.flags"
T = TypeVar("T")

HELP = frozenset({"-h", "--help"})  # how a command line asks for help
#: Modules that parse command lines. A script that uses one parses its own.
_OTHER_PARSERS = frozenset({"argparse", "click", "docopt", "fire", "getopt", "optparse", "tyro"})


_ALL: "list[Flag[Any]]" = []  # in the order in which they are defined here


class Flag(Generic[T]):
    """A flag of ours, in absl; its default while absl is not imported."""

    def __init__(
        self, name: str, help_text: str, default: Any = None, kind: str = "string", **options: Any
    ) -> None:
        """Describes a flag; `kind` selects the function of absl that defines it."""
        self.name = name
        self.default: T = default
        #: Whether a program may have an option of this name instead.
        self._is_common = "allow_override" in options
        self._definition = kind, help_text, options
        self._own: Any = None
        _ALL.append(self)

    def define(self, flags: Any) -> None:
        kind, help_text, options = self._definition
        if self._is_common and self.name in flags.FLAGS:
            return  # the program has defined it
        getattr(flags, f"DEFINE_{kind}")(self.name, self.default, help_text, **options)
        self._own = flags.FLAGS[self.name]

    def _find(self) -> Any:
        flags = loaded_flags()
        flag = None if flags is None else flags.FLAGS[self.name]
        if self._is_common and (flag is not self._own or _is_option_of_script(self.name)):
            return None
        return flag

    @property
    def value(self) -> T:
        flag = self._find()
        return self.default if flag is None else flag.value

    @property
    def chosen(self) -> T | None:
        """Its value, if that is not a default."""
        flag = self._find()
        return None if flag is None or flag.using_default_value else flag.value

    @property
    def present(self) -> bool:
        flag = self._find()
        return flag is not None and bool(flag.present)


_LAUNCHER: Flag[str | None] = Flag(
    "launcher", "Where the program runs: local_mp (the default), local_mt, ...", allow_override=True
)
_LP_LAUNCHER: Flag[str | None] = Flag(
    "lp_launcher", "As --launcher, for scripts that have an option --launcher themselves."
)
LAUNCHER_OPTION: Flag[list[str]] = Flag(
    "lp_launcher_option",
    "Option of the launcher, as in image=NAME; may be repeated.",
    [],
    "multi_string",
)
_LAUNCH_TYPE: Flag[str | None] = Flag(
    "lp_launch_type", "As --launcher, under its old name: local_mp, local_mt, test_mp, test_mt."
)
TERMINATION_NOTICE_SECS: Flag[float] = Flag(
    "lp_termination_notice_secs",
    "Seconds nodes have to end after they were asked; 0 ends them by force, below 0 never.",
    10.0,
    "float",
)
RESTART: Flag[str | None] = Flag(
    "lp_restart",
    "When nodes are restarted: never (the default), on_failure or always; or by group, as in "
    "actor=on_failure,evaluator=always.",
)
CHECKPOINTS: Flag[str | None] = Flag(
    "lp_checkpoints", "Folder for the state of nodes that can save and restore theirs."
)
CHECKPOINT_PERIOD_SECS: Flag[float] = Flag(
    "lp_checkpoint_period_secs",
    "Seconds between checkpoints in the folder of --lp_checkpoints; 0: only when nodes end well.",
    60.0,
    "float",
    lower_bound=0.0,
)
SEED: Flag[int | None] = Flag(
    "lp_seed", "Of the program: nodes get their own from it.", kind="integer"
)
LOG_DIR: Flag[str | None] = Flag("lp_log_dir", "Folder for the output of nodes.")
DASHBOARD: Flag[bool] = Flag(
    "dashboard",
    "Serve a page of the program on this machine while it runs, and print its link.",
    False,
    "boolean",
    allow_override=True,
)
TRACE: Flag[str | None] = Flag(
    "lp_trace",
    "File for a trace of the calls of all nodes, for https://ui.perfetto.dev: .json, .json.gz.",
)
HOSTS: Flag[str | None] = Flag(
    "hosts",
    "Hosts, for launchers that use several: h1,h2:gpu=2,user@h3, or a TOML file.",
    allow_override=True,
)

DEFAULT_LAUNCHER = "local_mp"


class _Finder:
    """Finds absl as usual, and defines our flags once it is loaded."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != _ABSL:
            return None
        others = [each for each in sys.meta_path if each is not self and hasattr(each, "find_spec")]
        found = (each.find_spec(name, path, target) for each in others)
        spec = next(filter(None, found), None)
        loader: Any = None if spec is None else spec.loader
        if hasattr(loader, "exec_module"):
            load = loader.exec_module

            def load_and_define(module: ModuleType) -> None:
                load(module)
                if module.__name__ == _ABSL:  # a loader may load others, too
                    _define(module)

            loader.exec_module = load_and_define
        return spec


_registry: Any = None  # the module of absl that has our flags
#: Whether later flags of absl count as parsed, by others or for lack of arguments.
_are_parsed = False


def _define(flags: Any) -> None:
    global _registry
    if _registry is not flags.FLAGS:
        _registry = flags.FLAGS
        for flag in _ALL:
            flag.define(flags)
        if _are_parsed:
            flags.FLAGS.mark_as_parsed()


def loaded_flags() -> Any:
    """Returns `absl.flags` with our flags; None if it is not imported."""
    flags = loaded_module(_ABSL)
    if flags is not None:
        _define(flags)
    return flags


def mark_as_parsed() -> None:
    """Marks flags as parsed, now or once absl is imported."""
    global _are_parsed
    _are_parsed = True
    if (flags := loaded_flags()) is not None:
        flags.FLAGS.mark_as_parsed()


sys.meta_path.insert(0, _Finder())
if _ABSL in sys.modules:
    from absl import flags as _flags

    _define(_flags)


def parse_known(argv: list[str]) -> list[str]:
    """Parses known flags and returns the rest, the program's name first."""
    from absl import flags

    return list(flags.FLAGS(argv, known_only=True))


def parse_script_arguments() -> None:
    """Parses this process's command line, if nothing has parsed it and it is a script's own.

    Raises LaunchError if an unknown flag is similar to a known one. Exits after a request for help.
    """
    # Under pytest and in notebooks, the arguments are not for us.
    foreign = "PYTEST_CURRENT_TEST" in os.environ or "ipykernel" in sys.modules
    arguments = sys.argv[:1] if foreign else sys.argv
    flags = loaded_flags()
    is_parsed = _are_parsed if flags is None else flags.FLAGS.is_parsed()
    if is_parsed:
        return
    if flags is None and not any(each.startswith("-") for each in arguments[1:]):
        mark_as_parsed()  # nothing is there to parse
        return
    _, *unknown = parse_known(arguments)
    # A parser of the script has refused unknown arguments, unless it was told not to.
    if not _parses_itself():
        if not HELP.isdisjoint(unknown):
            print(f"usage: {sys.argv[0]} [--FLAG=VALUE ...]\n\n{describe_flags()}")  # noqa: T201
            sys.exit(0)
        for argument in unknown:
            name = argument.removeprefix("--").partition("=")[0]
            if argument.startswith("--") and (near := nearest(name, flag_names())):
                raise LaunchError(f"unknown flag {argument!r}; did you mean --{near}?")


def _parses_itself() -> bool:
    """Returns whether the script has a name of a parser of command lines, or of a part of one."""
    # A loaded module alone does not count: libraries load them, too.
    for value in list(vars(sys.modules["__main__"]).values()):
        is_module = isinstance(value, ModuleType)
        origin = value.__name__ if is_module else getattr(value, "__module__", None)
        if isinstance(origin, str) and origin.partition(".")[0] in _OTHER_PARSERS:
            return True
    return False


def _is_option_of_script(name: str) -> bool:
    """Returns whether a calling frame has an option of this name from argparse."""
    argparse = sys.modules.get("argparse")
    frame: FrameType | None = sys._getframe()
    while argparse is not None and frame is not None:
        found = (each for each in frame.f_locals.values() if isinstance(each, argparse.Namespace))
        if any(hasattr(each, name) for each in found):
            return True
        frame = frame.f_back
    return False


def flag_names() -> list[str]:
    from absl import flags

    return [*flags.FLAGS]


def describe_flags() -> str:
    from absl import flags

    by_module = flags.FLAGS.flags_by_module_dict()
    parts = []
    for module, found in sorted(by_module.items()):
        if module.startswith("absl."):
            continue
        title = f"flags of {'launchpad_lite' if module == __name__ else module}"
        lines = [f"{title}:"]
        for flag in found:
            default = flag.flag_type().upper() if flag.default is None else flag.default
            lines.append(f"  --{flag.name}={default}\n      {flag.help}")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def given_or_flag(
    argument: str, given: Any, flag: Flag[Any], value: Any, shown: str | None = None
) -> Any:
    """Returns the argument of `launch`, or else what a flag says; warns if both are given."""
    if given is None:
        return value
    if flag.present and given != value:
        text = "--%s=%s has no effect: the script passes %s=%r to lp.launch"
        _LOGGER.warning(text, flag.name, shown or flag.value, argument, given)
    return given


def launcher_flag() -> Flag[str | None]:
    """Returns the flag by which the command line names a launcher, if it does."""
    return _LAUNCHER if _LAUNCHER.value is not None else _LP_LAUNCHER


def chosen_launcher() -> str:
    # In programs of the original, the second is theirs, which has a default.
    return launcher_flag().value or _LAUNCH_TYPE.chosen or DEFAULT_LAUNCHER


def chosen_restart() -> str | dict[str, str] | None:
    text = RESTART.value
    if text is None or "=" not in text:
        return text
    pairs = (part.partition("=") for part in text.split(","))
    return {label.strip(): when.strip() for label, _, when in pairs}
