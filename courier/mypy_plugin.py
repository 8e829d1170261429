"""A plug-in for mypy, which checks calls of a `courier.Remote[T]` as calls of a `T`.

Name it in the configuration of mypy:

    [tool.mypy]
    plugins = ["courier.mypy_plugin"]
"""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from mypy.plugin import AttributeContext, Plugin
from mypy.types import (
    AnyType,
    CallableType,
    Instance,
    Overloaded,
    ProperType,
    Type,
    get_proper_type,
)

if TYPE_CHECKING:
    from mypy.checker import TypeChecker

_FUTURE = "concurrent.futures._base.Future"
_COROUTINE = "typing.Coroutine"
_BLOCKING, _FUTURES, _AIO = (f"courier._remote.{name}" for name in ("Remote", "Futures", "Aio"))
#: What these have themselves.
_OWN = ("futures", "aio")
#: Served methods that return one of these are generators to a server; the item comes first.
_STREAMS = ("typing.Generator", "typing.Iterator", "typing.AsyncGenerator", "typing.AsyncIterator")


class CourierPlugin(Plugin):
    """Finds methods of clients in the class that is served."""

    def get_attribute_hook(self, fullname: str) -> Callable[[AttributeContext], Type] | None:
        """Returns what says the type of a method of a client."""
        view, _, name = fullname.rpartition(".")
        if view not in (_BLOCKING, _FUTURES, _AIO) or (view == _BLOCKING and name in _OWN):
            return None
        return functools.partial(_method_of, view, name)


def _method_of(view: str, name: str, context: AttributeContext) -> Type:
    client = get_proper_type(context.type)
    untyped = get_proper_type(context.default_attr_type)
    if not isinstance(client, Instance) or client.type.fullname != view:
        return untyped
    served = get_proper_type(client.args[0])
    if isinstance(served, AnyType) or not isinstance(untyped, CallableType):
        return untyped
    checker = cast("TypeChecker", context.api)
    look_up = checker.expr_checker.analyze_external_member_access
    found = get_proper_type(look_up(name, served, context.context))
    if isinstance(found, Instance):
        found = get_proper_type(look_up("__call__", found, context.context))
    if isinstance(found, CallableType):
        return _called(found, untyped, checker)
    if isinstance(found, Overloaded):
        return Overloaded([_called(each, untyped, checker) for each in found.items])
    return found


def _called(method: CallableType, untyped: CallableType, checker: "TypeChecker") -> CallableType:
    """Returns a method with the result that it has in a view, whose methods are otherwise `untyped`."""
    result = _awaited(get_proper_type(method.ret_type))
    wrapper = get_proper_type(untyped.ret_type)
    if isinstance(result, Instance) and result.type.fullname in _STREAMS:
        is_aio = isinstance(wrapper, Instance) and wrapper.type.fullname == _COROUTINE
        kind = "typing.AsyncIterator" if is_aio else "typing.Iterator"
        result = checker.named_generic_type(kind, [result.args[0]])
    if isinstance(wrapper, Instance):  # of a result that comes later
        result = wrapper.copy_modified(args=[*wrapper.args[:-1], result])
    return method.copy_modified(ret_type=result)


def _awaited(result: ProperType) -> ProperType:
    """Returns what a caller gets where a served method answers later."""
    if isinstance(result, Instance) and result.type.fullname in (_FUTURE, _COROUTINE):
        return get_proper_type(result.args[-1])
    return result


def plugin(version: str) -> type[Plugin]:  # noqa: ARG001
    """Returns the plug-in; called by mypy."""
    return CourierPlugin
