"""Workers in other languages: `protos/search/v1/search.proto` on brokers and on the name server.

It loads protobuf, so it is imported when the first such worker calls.
"""

from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING

import launchpad_lite as lp
from launchpad_lite.search._messages import Life, SearchMember, TaskOutcome, TaskProgress, TaskState
from launchpad_lite.search._proto import search_pb2 as pb

if TYPE_CHECKING:
    from launchpad_lite.search._broker import Broker
    from launchpad_lite.search.name_server import NameServer

_STATES = {pb.Outcome.State.Value(each.name): each for each in TaskState}


async def _work(broker: "Broker", request: bytes) -> bytes:
    asked = pb.WorkRequest.FromString(request)
    found = await broker.work(
        _life(asked.worker),
        list(asked.held),
        _outcomes(asked.outcomes, asked.worker),
        tuple(asked.kinds),
        asked.count,
        asked.wait_s,
    )
    reply = pb.WorkReply(is_over=found is None)
    for each in found or ():
        reply.assignments.add(id=each.id, token=each.token, kind=each.kind, payload=each.payload)
    return reply.SerializeToString()


async def _beat(broker: "Broker", request: bytes) -> bytes:
    asked = pb.BeatRequest.FromString(request)
    progress = [TaskProgress(each.id, each.step, each.value) for each in asked.progress]
    held = {each.id: each.token for each in asked.held}
    stops = await broker.beat(_life(asked.worker), held, progress)
    return pb.BeatReply(stops=stops).SerializeToString()


async def _leave(broker: "Broker", request: bytes) -> bytes:
    asked = pb.LeaveRequest.FromString(request)
    await broker.leave(_life(asked.worker), _outcomes(asked.outcomes, asked.worker))
    return pb.LeaveReply().SerializeToString()


def _outcomes(outcomes: Iterable[pb.Outcome], worker: pb.Worker) -> list[TaskOutcome]:
    """Returns outcomes; of a failure only the text, because its payload would be a pickle."""
    found = []
    for each in outcomes:
        state = _STATES.get(each.state)
        if state is None:
            raise ValueError(f"the outcome of task {each.id} has no state")
        payload = each.payload if state is TaskState.DONE else b""
        found.append(
            TaskOutcome(each.id, each.token, state, payload, each.text, each.seconds, worker.name)
        )
    return found


async def _register(names: "NameServer", request: bytes) -> bytes:
    who = _life(pb.RegisterRequest.FromString(request).worker)
    # The version of the protocol is in its name, and the same on both sides.
    await names.register(SearchMember("worker", who, version=lp.__version__))
    timing = await names.timing()
    return pb.RegisterReply(beat_s=timing.beat_s, poll_s=timing.poll_s).SerializeToString()


async def _show(names: "NameServer", request: bytes) -> bytes:
    asked = pb.PresenceRequest.FromString(request)
    view = await names.beat("worker", _life(asked.worker), broker=asked.broker)
    return pb.PresenceReply(is_known=view.is_known, is_over=view.is_closed).SerializeToString()


async def _place(names: "NameServer", request: bytes) -> bytes:
    asked = pb.PlaceRequest.FromString(request)
    broker = await names.place("worker", _life(asked.worker), asked.avoid)
    address, _ = (await names.view()).brokers.get(broker, ("", None))
    return pb.PlaceReply(broker=broker, address=address).SerializeToString()


async def _go(names: "NameServer", request: bytes) -> bytes:
    await names.leave("worker", _life(pb.LeaveRequest.FromString(request).worker))
    return pb.LeaveReply().SerializeToString()


def _life(worker: pb.Worker) -> Life:
    if not worker.name or not worker.life:
        raise ValueError("a worker has a name and a life")
    return Life(worker.name, worker.life)


BROKER: "dict[str, Callable[[Broker, bytes], Awaitable[bytes]]]" = {
    "Work": _work,
    "Beat": _beat,
    "Leave": _leave,
}
NAME_SERVER: "dict[str, Callable[[NameServer, bytes], Awaitable[bytes]]]" = {
    "Register": _register,
    "Beat": _show,
    "Place": _place,
    "Leave": _go,
}
