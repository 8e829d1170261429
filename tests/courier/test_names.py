"""Clients know which methods there are: what completes, and what is refused."""

import inspect
from collections.abc import Iterator
from typing import Any

import pytest

import courier
from tests.courier.conftest import Connect, Reserve, Serve
from tests.courier.waiting import wait_until


class Learner:
    def produce(self) -> int:
        return 1

    def weights(self) -> list[int]:
        return []


class Unknown:
    """A type that no other process can import; its values show what they hold."""

    def __reduce__(self) -> str:
        raise TypeError("it does not travel")

    def __repr__(self) -> str:
        return "Unknown(7)"


class Described:
    def step(self, k: Unknown = Unknown(), *, fast: bool = False) -> int:  # noqa: B008
        """Makes some steps."""
        return 1

    def bare(self, x, /):  # type: ignore[no-untyped-def]
        return x


class Replay:
    def sample(self) -> int:
        return 2


def views(client: Any) -> Iterator[Any]:
    pool = courier.Pool([client])
    yield from (client, client.futures, client.aio, courier.with_timeout(client, 60))
    yield from (pool, pool.futures, pool.all, pool.by_key(1))


@pytest.mark.parametrize("in_process", ["wire", "copy"])
def test_methods_complete_and_others_are_refused(serve: Serve, in_process: str) -> None:
    _, client = serve(Learner(), in_process=in_process)
    for view in views(client):
        wait_until(lambda view=view: {"produce", "weights"} <= set(dir(view)))
        wait_until(lambda view=view: not hasattr(view, "produse"))
        assert hasattr(view, "produce")
    with pytest.raises(courier.UnknownMethodError, match=r"'produse' \(did you mean 'produce'\?\)"):
        wait_until(lambda: client.produse)


@pytest.mark.parametrize("in_process", ["wire", "copy"])
def test_a_method_tells_its_signature_and_docstring(serve: Serve, in_process: str) -> None:
    _, client = serve(Described(), in_process=in_process)
    parameters = f"(k: {__name__}.Unknown = Unknown(7), *, fast: bool = False)"
    assert str(inspect.signature(client.step)) == f"{parameters} -> int"
    assert str(inspect.signature(client.futures.step)).startswith(f"{parameters} -> courier.")
    assert str(inspect.signature(client.bare)) == "(x, /)"
    for view in (client, client.futures, client.aio, courier.with_timeout(client, 60)):
        assert inspect.getdoc(view.step) == "Makes some steps."
        assert inspect.getdoc(view.bare) is None


def test_without_a_server_no_name_is_refused_and_none_is_waited_for_long(
    connect: Connect, reserve: Reserve
) -> None:
    client = connect(f"127.0.0.1:{reserve()}")
    assert "futures" in dir(client)
    assert hasattr(client, "produce")
    assert client.produce.__doc__ is None
    courier.close(client)
    assert "futures" in dir(client)
    assert hasattr(client, "produce")
    assert str(inspect.signature(client.produce)) == "(*args: Any, **kwargs: Any) -> Any"


def test_what_is_served_later_is_not_refused(serve: Serve, connect: Connect) -> None:
    server, client = serve(Learner())
    assert client.produce() == 1  # a connection is enough to know what is there
    wait_until(lambda: not hasattr(client, "produse"))
    server.bind("late", lambda: 3)
    assert client.late() == 3
    assert "late" in dir(client)
    assert client.late() == 3
    port = server.port
    server.stop()
    serve(Replay(), port=port)
    assert client.sample() == 2
    assert "late" not in dir(client)
    wait_until(lambda: not hasattr(client, "produce"))


def test_a_cache_has_the_methods_of_its_target(serve: Serve, connect: Connect) -> None:
    _, target = serve(Learner())
    cache = courier.Cache(target, refresh_s=60, stale_s=60)
    _, client = serve(cache)
    assert client.produce() == 1
    wait_until(lambda: "weights" in dir(client))
    wait_until(lambda: not hasattr(client, "sample"))
