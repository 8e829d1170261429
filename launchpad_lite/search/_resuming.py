"""Files beside the state of a search: its identity, and the code that it ran last."""

import hashlib
import inspect
import json
import os
from pathlib import Path
from typing import Any

from launchpad_lite.parts.private_files import make_folder, read_private, write_private
from launchpad_lite.search.errors import SearchError
from launchpad_lite.search.models import Model, name_of

_FILE = "search.json"


def begin(folder: Path, model: Model, *, anyway: bool, is_elsewhere: bool) -> list[str]:
    """Records that a search begins or goes on; returns the files whose code has changed.

    With `anyway`, it may differ from the search whose state is there. The state of the model may be
    in another folder (`is_elsewhere`).
    """
    make_folder(folder)
    path = folder / _FILE
    now: dict[str, Any] = {
        "search": {"algorithm": name_of(type(model)), **model.identity()},
        "code": _code_of(model),
        "process": process_here(),
    }
    has_state = (folder / "model").exists()
    others = has_state or (folder / "trials").exists() or any(folder.glob("*.sqlite"))
    if others and not path.exists():
        raise SearchError(
            f"{folder}: an earlier version of launchpad-lite has kept a search here, or another program its "
            "files, which this one cannot go on with. Name a new folder"
        )
    # Without a state, an earlier call has no results to lose.
    before = (
        json.loads(read_private(path)) if path.exists() and (has_state or is_elsewhere) else now
    )
    if not anyway:
        _check_same(folder, before["search"], now["search"])
    write_private(path, json.dumps(now, indent=1).encode())
    return [name for name, digest in now["code"].items() if before["code"].get(name) != digest]


def process_here() -> str:
    """Returns what names this process for people on other hosts."""
    return f"process {os.getpid()} on {os.uname().nodename}"


def holder_of(folder: Path) -> str:
    """Returns which process has called a search last."""
    path = folder / _FILE
    found = json.loads(read_private(path)) if path.exists() else {}
    return str(found.get("process", "another process"))


def _check_same(folder: Path, before: dict[str, str], now: dict[str, str]) -> None:
    changes = [
        f"its {name} is {now.get(name)}, and was {before.get(name)}"
        for name in dict.fromkeys([*before, *now])
        if before.get(name) != now.get(name)
    ]
    if changes:
        raise SearchError(
            f"{folder} keeps another search than this one: {'; '.join(changes)}. Name a new folder, or go "
            'on with what is kept there: search.run(..., resume="anyway")'
        )


def _code_of(model: Model) -> dict[str, str]:
    """Returns a digest of each file with code of a search that is the user's."""
    found = {}
    for each in (type(model), *vars(model).values()):
        try:
            file = inspect.getsourcefile(inspect.unwrap(getattr(each, "func", each)))
            if callable(each) and file and Path(file).parent != Path(__file__).parent:
                found[Path(file).name] = hashlib.sha256(Path(file).read_bytes()).hexdigest()
        except (TypeError, OSError):
            pass  # it has no file: it is no code, or was entered in a shell
    return found
