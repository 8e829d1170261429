"""Command-line flags (absl) that exist once this package is imported."""

import logging
import os
import sys
from types import ModuleType
from typing import Any

from absl import flags

from launchpad_lite._settings import nearest
from launchpad_lite.errors import LaunchError

_LOGGER = logging.getLogger(__name__)

#: How a command line asks for help.
HELP = frozenset({"-h", "--help"})
#: Modules that parse command lines. A script that uses one parses its own.
_OTHER_PARSERS = frozenset({"argparse", "click", "docopt", "fire", "getopt", "optparse", "tyro"})

LAUNCHER = flags.DEFINE_string(
    "launcher", None, "Where the program runs: local_mp (the default), local_mt, ..."
)
LAUNCHER_OPTION = flags.DEFINE_multi_string(
    "lp_launcher_option", [], "Option of the launcher, as in image=NAME; may be repeated."
)
flags.DEFINE_string(
    "lp_launch_type", None, "The same under its old name: local_mp, local_mt, test_mp, test_mt."
)
TERMINATION_NOTICE_SECS = flags.DEFINE_float(
    "lp_termination_notice_secs",
    10.0,
    "Seconds nodes have to end after they were asked; 0 ends them by force, below 0 never.",
)

RESTART = flags.DEFINE_string(
    "lp_restart",
    None,
    "When nodes are restarted: never (the default), on_failure or always; or by group, as in "
    "actor=on_failure,evaluator=always.",
)
CHECKPOINTS = flags.DEFINE_string(
    "lp_checkpoints", None, "Folder for the state of nodes that can save and restore theirs."
)

SEED = flags.DEFINE_integer("lp_seed", None, "Of the program: nodes get their own from it.")
LOG_DIR = flags.DEFINE_string("lp_log_dir", None, "Folder for the output of nodes.")

_HOSTS = flags.DEFINE_string(
    "hosts",
    None,
    "Hosts, for launchers that use several: h1,h2:gpu=2,user@h3, or a TOML file.",
    # A common word: a program may have a flag of this name, which then is the program's.
    allow_override=True,
)
_OWN_HOSTS = flags.FLAGS["hosts"]

DEFAULT_LAUNCHER = "local_mp"


def parse_known(argv: list[str]) -> list[str]:
    """Parses what it knows and returns the rest, the program's name first."""
    return list(flags.FLAGS(argv, known_only=True))


def parse_script_arguments() -> None:
    """Parses this process's command line, if nothing has parsed it and it is a script's own.

    Raises:
        LaunchError: It has a flag that is nearly one of those that are known.
        SystemExit: It asks for help, which was printed.
    """
    if flags.FLAGS.is_parsed():
        return
    # Under pytest and in notebooks the arguments are theirs, and mean other things to us.
    foreign = "PYTEST_CURRENT_TEST" in os.environ or "ipykernel" in sys.modules
    _, *unknown = parse_known(sys.argv[:1] if foreign else sys.argv)
    # A parser of the script's own has refused what it does not know, unless it was told not to.
    if not _parses_itself():
        if not HELP.isdisjoint(unknown):
            print(f"usage: {sys.argv[0]} [--FLAG=VALUE ...]\n\n{describe_flags()}")  # noqa: T201
            sys.exit(0)
        for argument in unknown:
            name = argument.removeprefix("--").partition("=")[0]
            if argument.startswith("--") and (near := nearest(name, [*flags.FLAGS])):
                raise LaunchError(f"unknown flag {argument!r}; did you mean --{near}?")


def _parses_itself() -> bool:
    """Returns whether the script has a name for a parser of command lines, or for a part of one.

    Not whether one is loaded: libraries load them, too.
    """
    for value in list(vars(sys.modules["__main__"]).values()):
        is_module = isinstance(value, ModuleType)
        origin = value.__name__ if is_module else getattr(value, "__module__", None)
        if isinstance(origin, str) and origin.partition(".")[0] in _OTHER_PARSERS:
            return True
    return False


def describe_flags() -> str:
    """Returns the flags of the script and of this package, with their defaults, as text."""
    by_module = flags.FLAGS.flags_by_module_dict()
    parts = []
    for module, found in sorted(by_module.items()):
        if module.startswith("absl."):
            continue
        title = f"flags of {'launchpad_lite' if module == __name__ else module}"
        lines = [f"  --{flag.name}={_default(flag)}\n      {flag.help}" for flag in found]
        parts.append("\n".join([f"{title}:", *lines]))
    return "\n\n".join(parts)


def _default(flag: Any) -> str:
    return flag.flag_type().upper() if flag.default is None else str(flag.default)


def given_or_flag(
    argument: str, given: Any, flag: "flags.FlagHolder[Any]", value: Any, shown: str | None = None
) -> Any:
    """Returns the argument of `launch`, or what a flag says if that is None.

    Args:
        argument: Its name.
        given: The argument.
        flag: The flag. If both are given, a warning says that the flag has no effect.
        value: What the flag says.
        shown: How the warning shows it, if not as the value of the flag.
    """
    if given is None:
        return value
    if flag.present and given != value:
        text = "--%s=%s has no effect: the script passes %s=%r to lp.launch"
        _LOGGER.warning(text, flag.name, shown or flag.value, argument, given)
    return given


def chosen_launcher() -> str:
    """Returns the launcher that the command line asks for."""
    kind = flags.FLAGS["lp_launch_type"]
    # Where programs of the original run, it is theirs, which has a value by default.
    named = None if kind.using_default_value else kind.value
    return LAUNCHER.value or named or DEFAULT_LAUNCHER


def chosen_hosts() -> str | None:
    """Returns the hosts that the command line names."""
    return _HOSTS.value if flags.FLAGS["hosts"] is _OWN_HOSTS else None


def chosen_restart() -> str | dict[str, str] | None:
    """Returns the restart policies that the command line asks for."""
    text = RESTART.value
    if text is None or "=" not in text:
        return text
    pairs = (part.partition("=") for part in text.split(","))
    return {label.strip(): when.strip() for label, _, when in pairs}
