"""Reads the folder of a search: its results so far; runs one of its trials again."""

import contextlib
import os
import pickle
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import courier
from launchpad_lite.parts.joining import JOIN_FILE, JoinInfo
from launchpad_lite.parts.private_files import check_own_folder
from launchpad_lite.search._resuming import holder_of
from launchpad_lite.search._timing import Timing
from launchpad_lite.search.errors import SearchError
from launchpad_lite.search.models import Model
from launchpad_lite.search.results import Result
from launchpad_lite.search.tasks import Running, RunningTrial, running


def load(folder: str | os.PathLike[str]) -> Result:
    """Returns the results of the search with this folder; starts, locks and changes nothing.

    It is as of the newest checkpoint: a running search makes one every 10 s. If the model cannot be
    unpickled here, `model` is a `search.Model`, whose `missing` says why.

    Raises:
        SearchError: No search is kept there, it cannot be read, or others could have written it.

    Example:
        result = search.load("runs/1")
        print(result.state, result.best, result.errors)
    """
    result, data = look(Path(folder))
    try:
        return replace(result, model=pickle.loads(data)[0])
    except Exception as error:  # noqa: BLE001 - unpickling runs any code
        vars(result.model)["missing"] = repr(error)
        return result


def rerun(folder: str | os.PathLike[str], number: int) -> Any:
    """Runs a trial again alone, in this thread, as for a debugger; returns what its task returns.

    It has the same task, params, number, seed and `parent`, the newest code (of a script, what this
    one has under the same names), and a new folder, in `reruns` in that of the search. `search.report`
    prints. Of models of your own, the first 1,000 tasks that failed are kept, of at most 64 KiB each.

    Raises:
        SearchError: As for `load`; or the task is not there.
        Exception: What the task raises.

    Example:
        from tune import *  # the newest code of the script

        search.rerun("runs/1", 17)
    """
    result, data = look(Path(folder))
    *_, ended = pickle.loads(data)
    if (task := ended.get(number)) is None:
        raise SearchError(f"{folder}: trial {number} has not ended, or its task was not kept")
    own = Path(folder).absolute() / "reruns" / f"{number}-{uuid.uuid4().hex[:8]}"
    was = result.trials[number]
    trial = RunningTrial(number, was.seed, result.folder, was.parent, was.steps, own)
    here = Running("", lambda: print("reports", *here.progress[-1][1:]), trial=trial)  # noqa: T201
    token = running.set(here)
    try:
        return getattr(task, "run", task)()
    finally:
        running.reset(token)


def look(folder: Path) -> tuple[Result, bytes]:
    """Returns the result of `load`, without the model, and the model as bytes."""
    while True:
        found = folder.glob("model/*_model/0/[0-9]*[0-9]")
        newest = max(found, key=lambda path: int(path.name), default=None)
        if newest is None:
            raise SearchError(
                f"{folder} is no folder= of a search, or none of its trials has ended"
            )
        try:
            check_own_folder(newest.parent)
            with (newest / "state" / "model.pickle").open("rb") as file:
                state, data = pickle.load(file), file.read()
            model = Model()
            vars(model).update(maximize=state["maximize"], missing="it was not loaded")
            result = Result(state["trials"], model, state["seconds"], folder.absolute())
            return replace(result, state=_state_of(folder, state)), data
        except Exception as error:  # of unpickling parameters, too
            if newest.exists():  # else the search has just removed it
                raise SearchError(f"{newest} cannot be read by this program: {error!r}") from error


def _state_of(folder: Path, state: dict[str, Any]) -> str:
    with contextlib.suppress(SearchError):  # it has no such file, or gets no answer
        timing_of(read_join_file(folder / JOIN_FILE), answer_s=2.0)
        return "running"
    holder = holder_of(folder)
    if (folder / JOIN_FILE).exists() and not holder.endswith(f" on {os.uname().nodename}"):
        return f"unknown: {holder} does not answer here; it runs, or was killed"
    return "failed" if state["has_failed"] else "complete" if state["is_over"] else "stopped"


def read_join_file(path: Path) -> JoinInfo:
    """Returns what a running search lets workers in with."""
    return JoinInfo.read(path, "a search", SearchError)


def timing_of(info: JoinInfo, answer_s: float = 20.0) -> Timing:
    """Returns the timing of a search, which its name server must tell within `answer_s`."""
    client = info.connect(wait_for_ready=False, call_timeout_s=answer_s)
    where = info.address
    try:
        timing: Timing = client.timing()
    except courier.AuthenticationError as error:
        raise SearchError(
            f"{where} does not take this secret: it is that of another search, or of an earlier start "
            f"of this one ({error})"
        ) from error
    except courier.ServerGoneError as error:
        raise SearchError(
            f"no answer from {where}: the search has ended or is not up yet, or this machine "
            f"does not reach it ({error})"
        ) from error
    except courier.UnknownMethodError as error:
        raise SearchError(f"at {where} is no name server of a search") from error
    except courier.CourierError as error:
        raise SearchError(f"the name server at {where} does not answer: {error}") from error
    finally:
        courier.close(client)
    return timing
