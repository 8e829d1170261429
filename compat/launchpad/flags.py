"""The flags of the original. Those that launchpad-lite has as well are its own."""

from absl import flags

import launchpad_lite  # noqa: F401 - defines flags
from launchpad.context import LaunchType

FLAGS = flags.FLAGS

# Programs read it, and check whether it begins with "local": it always has a value.
LAUNCH_TYPE = flags.DEFINE_enum(
    "lp_launch_type",
    LaunchType.LOCAL_MULTI_THREADING.value,
    [each.value for each in LaunchType],
    "How to launch; --launcher, which knows more, counts if both are given.",
    allow_override=True,
)
# Also before the command line is parsed.
FLAGS["lp_launch_type"].present = 1
flags.DEFINE_string("tmux_open_window", None, "Window of the tmux session to show: label/replica.")
flags.DEFINE_string("tmux_session_name", "launchpad", "How names of tmux sessions begin.")
flags.DEFINE_bool("lp_catch_deferred_exception", True, "Has no effect: errors are never hidden.")
flags.DEFINE_bool("lp_worker_manager_v2", False, "Has no effect: there is one.")
