"""How Python workers from outside of the program join a running search."""

import threading
import uuid
from pathlib import Path

import courier
from launchpad_lite.parts.joining import JoinInfo
from launchpad_lite.search._messages import Life, member_here
from launchpad_lite.search._presence import Presence
from launchpad_lite.search._timing import Timing
from launchpad_lite.search.errors import SearchError
from launchpad_lite.search.worker import Worker

#: Seconds that the name server has to answer the first call.
_ANSWER_S = 20.0


def read_join_file(path: Path) -> JoinInfo:
    return JoinInfo.read(path, "a search", SearchError)


def outside_worker(info: JoinInfo, name: str, stop: threading.Event) -> Worker:
    """Returns a worker that belongs to no program; once `stop` is set, it ends after its task."""
    timing = timing_of(info)
    member = member_here("worker", Life(name, uuid.uuid4().hex))
    return Worker(Presence(member, info.connect(), {}, info.connect, timing), stop)


def timing_of(info: JoinInfo, answer_s: float = _ANSWER_S) -> Timing:
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
