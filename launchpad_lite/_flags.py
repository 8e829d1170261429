"""Command-line flags (absl) that exist once this package is imported."""

import os
import sys

from absl import flags

LAUNCHER = flags.DEFINE_string(
    "launcher", None, "Where the program runs: local_mp (the default), local_mt, ..."
)
LAUNCH_TYPE = flags.DEFINE_string(
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
    "When nodes are started anew: never (the default), on_failure or always; or by group, as in "
    "actor=on_failure,evaluator=always.",
)
CHECKPOINTS = flags.DEFINE_string(
    "lp_checkpoints", None, "Folder for the state of nodes that can save and restore theirs."
)

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
    """Parses this process's command line, if nobody did and it is a script's own."""
    if flags.FLAGS.is_parsed():
        return
    # Under pytest and in notebooks the arguments are theirs, and mean other things to us.
    foreign = "PYTEST_CURRENT_TEST" in os.environ or "ipykernel" in sys.modules
    parse_known(sys.argv[:1] if foreign else sys.argv)


def chosen_launcher() -> str:
    """Returns the launcher that the command line asks for."""
    return LAUNCHER.value or LAUNCH_TYPE.value or DEFAULT_LAUNCHER


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
