from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Worker(_message.Message):
    __slots__ = ("name", "life")
    NAME_FIELD_NUMBER: _ClassVar[int]
    LIFE_FIELD_NUMBER: _ClassVar[int]
    name: str
    life: str
    def __init__(self, name: _Optional[str] = ..., life: _Optional[str] = ...) -> None: ...

class RegisterRequest(_message.Message):
    __slots__ = ("worker",)
    WORKER_FIELD_NUMBER: _ClassVar[int]
    worker: Worker
    def __init__(self, worker: _Optional[_Union[Worker, _Mapping]] = ...) -> None: ...

class RegisterReply(_message.Message):
    __slots__ = ("beat_s", "poll_s")
    BEAT_S_FIELD_NUMBER: _ClassVar[int]
    POLL_S_FIELD_NUMBER: _ClassVar[int]
    beat_s: float
    poll_s: float
    def __init__(self, beat_s: _Optional[float] = ..., poll_s: _Optional[float] = ...) -> None: ...

class PresenceRequest(_message.Message):
    __slots__ = ("worker", "broker")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    BROKER_FIELD_NUMBER: _ClassVar[int]
    worker: Worker
    broker: str
    def __init__(self, worker: _Optional[_Union[Worker, _Mapping]] = ..., broker: _Optional[str] = ...) -> None: ...

class PresenceReply(_message.Message):
    __slots__ = ("is_known", "is_over")
    IS_KNOWN_FIELD_NUMBER: _ClassVar[int]
    IS_OVER_FIELD_NUMBER: _ClassVar[int]
    is_known: bool
    is_over: bool
    def __init__(self, is_known: bool = ..., is_over: bool = ...) -> None: ...

class PlaceRequest(_message.Message):
    __slots__ = ("avoid", "worker")
    AVOID_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    avoid: _containers.RepeatedScalarFieldContainer[str]
    worker: Worker
    def __init__(self, avoid: _Optional[_Iterable[str]] = ..., worker: _Optional[_Union[Worker, _Mapping]] = ...) -> None: ...

class PlaceReply(_message.Message):
    __slots__ = ("broker", "address")
    BROKER_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    broker: str
    address: str
    def __init__(self, broker: _Optional[str] = ..., address: _Optional[str] = ...) -> None: ...

class WorkRequest(_message.Message):
    __slots__ = ("worker", "held", "outcomes", "kinds", "count", "wait_s")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    KINDS_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    worker: Worker
    held: _containers.RepeatedScalarFieldContainer[str]
    outcomes: _containers.RepeatedCompositeFieldContainer[Outcome]
    kinds: _containers.RepeatedScalarFieldContainer[str]
    count: int
    wait_s: float
    def __init__(self, worker: _Optional[_Union[Worker, _Mapping]] = ..., held: _Optional[_Iterable[str]] = ..., outcomes: _Optional[_Iterable[_Union[Outcome, _Mapping]]] = ..., kinds: _Optional[_Iterable[str]] = ..., count: _Optional[int] = ..., wait_s: _Optional[float] = ...) -> None: ...

class WorkReply(_message.Message):
    __slots__ = ("assignments", "is_over")
    ASSIGNMENTS_FIELD_NUMBER: _ClassVar[int]
    IS_OVER_FIELD_NUMBER: _ClassVar[int]
    assignments: _containers.RepeatedCompositeFieldContainer[Assignment]
    is_over: bool
    def __init__(self, assignments: _Optional[_Iterable[_Union[Assignment, _Mapping]]] = ..., is_over: bool = ...) -> None: ...

class Assignment(_message.Message):
    __slots__ = ("id", "token", "kind", "payload")
    ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    id: str
    token: str
    kind: str
    payload: bytes
    def __init__(self, id: _Optional[str] = ..., token: _Optional[str] = ..., kind: _Optional[str] = ..., payload: _Optional[bytes] = ...) -> None: ...

class Outcome(_message.Message):
    __slots__ = ("id", "token", "state", "payload", "text", "seconds")
    class State(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        STATE_UNSPECIFIED: _ClassVar[Outcome.State]
        DONE: _ClassVar[Outcome.State]
        FAILED: _ClassVar[Outcome.State]
        STOPPED: _ClassVar[Outcome.State]
    STATE_UNSPECIFIED: Outcome.State
    DONE: Outcome.State
    FAILED: Outcome.State
    STOPPED: Outcome.State
    ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    id: str
    token: str
    state: Outcome.State
    payload: bytes
    text: str
    seconds: float
    def __init__(self, id: _Optional[str] = ..., token: _Optional[str] = ..., state: _Optional[_Union[Outcome.State, str]] = ..., payload: _Optional[bytes] = ..., text: _Optional[str] = ..., seconds: _Optional[float] = ...) -> None: ...

class BeatRequest(_message.Message):
    __slots__ = ("worker", "held", "progress")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    worker: Worker
    held: _containers.RepeatedCompositeFieldContainer[Held]
    progress: _containers.RepeatedCompositeFieldContainer[Progress]
    def __init__(self, worker: _Optional[_Union[Worker, _Mapping]] = ..., held: _Optional[_Iterable[_Union[Held, _Mapping]]] = ..., progress: _Optional[_Iterable[_Union[Progress, _Mapping]]] = ...) -> None: ...

class Held(_message.Message):
    __slots__ = ("id", "token")
    ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    id: str
    token: str
    def __init__(self, id: _Optional[str] = ..., token: _Optional[str] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("id", "step", "value")
    ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    id: str
    step: int
    value: float
    def __init__(self, id: _Optional[str] = ..., step: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...

class BeatReply(_message.Message):
    __slots__ = ("stops",)
    STOPS_FIELD_NUMBER: _ClassVar[int]
    stops: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, stops: _Optional[_Iterable[str]] = ...) -> None: ...

class LeaveRequest(_message.Message):
    __slots__ = ("worker", "outcomes")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    worker: Worker
    outcomes: _containers.RepeatedCompositeFieldContainer[Outcome]
    def __init__(self, worker: _Optional[_Union[Worker, _Mapping]] = ..., outcomes: _Optional[_Iterable[_Union[Outcome, _Mapping]]] = ...) -> None: ...

class LeaveReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
