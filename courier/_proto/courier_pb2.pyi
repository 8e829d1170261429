from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class HelloRequest(_message.Message):
    __slots__ = ("nonce",)
    NONCE_FIELD_NUMBER: _ClassVar[int]
    nonce: bytes
    def __init__(self, nonce: _Optional[bytes] = ...) -> None: ...

class HelloReply(_message.Message):
    __slots__ = ("nonce", "session", "proof")
    NONCE_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    nonce: bytes
    session: bytes
    proof: bytes
    def __init__(self, nonce: _Optional[bytes] = ..., session: _Optional[bytes] = ..., proof: _Optional[bytes] = ...) -> None: ...

class Sealed(_message.Message):
    __slots__ = ("head", "seal", "pickle", "buffers")
    HEAD_FIELD_NUMBER: _ClassVar[int]
    SEAL_FIELD_NUMBER: _ClassVar[int]
    PICKLE_FIELD_NUMBER: _ClassVar[int]
    BUFFERS_FIELD_NUMBER: _ClassVar[int]
    head: bytes
    seal: bytes
    pickle: bytes
    buffers: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, head: _Optional[bytes] = ..., seal: _Optional[bytes] = ..., pickle: _Optional[bytes] = ..., buffers: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Parcel(_message.Message):
    __slots__ = ("pickle_bytes", "pickle_sha256", "buffer_bytes")
    PICKLE_BYTES_FIELD_NUMBER: _ClassVar[int]
    PICKLE_SHA256_FIELD_NUMBER: _ClassVar[int]
    BUFFER_BYTES_FIELD_NUMBER: _ClassVar[int]
    pickle_bytes: int
    pickle_sha256: bytes
    buffer_bytes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, pickle_bytes: _Optional[int] = ..., pickle_sha256: _Optional[bytes] = ..., buffer_bytes: _Optional[_Iterable[int]] = ...) -> None: ...

class RequestHead(_message.Message):
    __slots__ = ("session", "sequence", "method", "arguments", "ticket")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    sequence: int
    method: str
    arguments: Parcel
    ticket: bytes
    def __init__(self, session: _Optional[bytes] = ..., sequence: _Optional[int] = ..., method: _Optional[str] = ..., arguments: _Optional[_Union[Parcel, _Mapping]] = ..., ticket: _Optional[bytes] = ...) -> None: ...

class ReplyHead(_message.Message):
    __slots__ = ("sequence", "kind", "parcel", "ticket", "type_name", "text", "traceback", "item")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_UNSPECIFIED: _ClassVar[ReplyHead.Kind]
        VALUE: _ClassVar[ReplyHead.Kind]
        FAILURE: _ClassVar[ReplyHead.Kind]
        LARGE: _ClassVar[ReplyHead.Kind]
        GENERATOR: _ClassVar[ReplyHead.Kind]
        UNKNOWN_METHOD: _ClassVar[ReplyHead.Kind]
        END: _ClassVar[ReplyHead.Kind]
        UNPICKLABLE: _ClassVar[ReplyHead.Kind]
        BAD_ARGUMENTS: _ClassVar[ReplyHead.Kind]
    KIND_UNSPECIFIED: ReplyHead.Kind
    VALUE: ReplyHead.Kind
    FAILURE: ReplyHead.Kind
    LARGE: ReplyHead.Kind
    GENERATOR: ReplyHead.Kind
    UNKNOWN_METHOD: ReplyHead.Kind
    END: ReplyHead.Kind
    UNPICKLABLE: ReplyHead.Kind
    BAD_ARGUMENTS: ReplyHead.Kind
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    PARCEL_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    TYPE_NAME_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TRACEBACK_FIELD_NUMBER: _ClassVar[int]
    ITEM_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    kind: ReplyHead.Kind
    parcel: Parcel
    ticket: bytes
    type_name: str
    text: str
    traceback: str
    item: int
    def __init__(self, sequence: _Optional[int] = ..., kind: _Optional[_Union[ReplyHead.Kind, str]] = ..., parcel: _Optional[_Union[Parcel, _Mapping]] = ..., ticket: _Optional[bytes] = ..., type_name: _Optional[str] = ..., text: _Optional[str] = ..., traceback: _Optional[str] = ..., item: _Optional[int] = ...) -> None: ...

class Piece(_message.Message):
    __slots__ = ("opening", "data")
    OPENING_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    opening: Sealed
    data: bytes
    def __init__(self, opening: _Optional[_Union[Sealed, _Mapping]] = ..., data: _Optional[bytes] = ...) -> None: ...

class Raw(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
