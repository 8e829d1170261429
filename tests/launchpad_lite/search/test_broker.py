"""What a broker does beside its queue."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

import launchpad_lite as lp
from launchpad_lite.search._broker import Broker, BrokerOptions
from launchpad_lite.search._messages import Submission
from launchpad_lite.search._store import SqliteStore
from launchpad_lite.search._timing import Timing
from launchpad_lite.search.errors import StoreError


@pytest.fixture
def broker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Broker:
    monkeypatch.setattr(lp, "current_node", lambda: SimpleNamespace(name="broker[0]"))
    options = BrokerOptions(Timing(), str(tmp_path))
    return Broker(SimpleNamespace(address=""), None, {}, options)


def test_a_broker_that_could_not_store_a_task_does_not_accept_it_when_it_comes_again(
    broker: Broker,
) -> None:
    store = broker._store
    assert isinstance(store, SqliteStore)
    store._database.execute("pragma max_page_count = 10")

    async def submit() -> None:
        for _ in range(2):
            with pytest.raises(StoreError, match="make room"):
                await broker.submit("model", [Submission("1", bytes(1_000_000))])

    asyncio.run(submit())
    store.close()
