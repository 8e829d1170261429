"""Everything that can go wrong with a program, as one tree.

    LaunchpadError
    ├── ProgramError             the program has mistakes; all of them are listed       (ValueError)
    ├── ProgramPathError         a program named on the command line cannot be found    (ImportError)
    ├── UnknownLauncherError     no launcher of this name is installed                  (ValueError)
    ├── LauncherLoadError        a launcher is installed, but its code does not import  (ImportError)
    ├── MissingExtraError        an optional package is not installed                   (ImportError)
    ├── NoProgramError           asked for the running program where there is none      (RuntimeError, AssertionError)
    ├── UnresolvedAddressError   a handle was dereferenced before its program runs      (RuntimeError)
    ├── NodeFailedError          a node failed, and the program with it                 (RuntimeError)
    ├── LaunchError              the program could not be started                       (RuntimeError)
    ├── CommandError             a command that is a node failed                        (RuntimeError)
    └── CheckpointError          the state of a node cannot be saved or restored        (RuntimeError)

Calls between nodes raise the errors of `courier.errors`.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from launchpad_lite.parts.escapes import shown

if TYPE_CHECKING:
    from launchpad_lite.life.result import NodeFailure


class LaunchpadError(Exception):
    """The root of all errors that launchpad_lite itself raises."""


class ProgramError(LaunchpadError, ValueError):
    """The program has mistakes; nothing was started.

    Attributes:
        mistakes: One text each, naming the node and what to do.
    """

    def __init__(self, program: str, mistakes: Sequence[str]) -> None:
        super().__init__(program, tuple(mistakes))
        self.program = program
        self.mistakes = tuple(mistakes)

    def __str__(self) -> str:
        if len(self.mistakes) == 1:
            return f"program {self.program!r}: {self.mistakes[0]}"
        lines = "".join(f"\n  {i}. {text}" for i, text in enumerate(self.mistakes, start=1))
        return f"program {self.program!r} has {len(self.mistakes)} mistakes:{lines}"


class ProgramPathError(LaunchpadError, ImportError):
    """A program named as `module:function` cannot be imported or called."""


class UnknownLauncherError(LaunchpadError, ValueError):
    """No launcher of this name is installed; the message lists those that are."""


class LauncherLoadError(LaunchpadError, ImportError):
    """A launcher is installed, but importing it failed; the cause says why."""


class MissingExtraError(LaunchpadError, ImportError):
    """An optional package is needed; the message has the pip line."""


class NoProgramError(LaunchpadError, RuntimeError, AssertionError):
    """There is no running program here, or there are several."""


class UnresolvedAddressError(LaunchpadError, RuntimeError):
    """An address is known only once its program was launched."""


class LaunchError(LaunchpadError, RuntimeError):
    """The program could not be started; nothing of it is left running."""

    def __str__(self) -> str:
        return shown(super().__str__())


class CommandError(LaunchpadError, RuntimeError):
    """A command that is a node could not be started, did not get ready, or failed."""


class CheckpointError(LaunchpadError, RuntimeError):
    """The state of a node could not be saved or restored; the message names the folder."""


class NodeFailedError(LaunchpadError, RuntimeError):
    """A node failed, and with it the program. The cause is the node's exception, if it raised.

    Attributes:
        failure: The first failure, as data.
        consequences: Failures of other nodes that followed from it.
        folder: Where all that is known of it was written, logs included.
    """

    def __init__(
        self, failure: "NodeFailure", consequences: "Sequence[NodeFailure]" = (), folder: str = ""
    ) -> None:
        super().__init__(failure, tuple(consequences), folder)
        self.failure = failure
        self.consequences = tuple(consequences)
        self.folder = folder

    def __str__(self) -> str:
        from launchpad_lite.life.result import description, gathered, headline

        first, *rest = gathered((self.failure, *self.consequences))
        text = description(first)
        if rest:
            followed = "".join(f"\n  {headline(each)}" for each in rest)
            text += f"\n\nWhat followed:{followed}"
        if self.folder:
            text += f"\n\nCrash folder: {self.folder}"
        return shown(text)
