"""What a broker does beside its queue."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

import launchpad_lite as lp
from launchpad_lite.search._broker import Broker
from launchpad_lite.search._messages import Life, TaskOutcome, TaskState, TaskSubmission
from launchpad_lite.search._parts import BrokerOptions
from launchpad_lite.search._queue import Changes
from launchpad_lite.search._sqlite import BROKERS, SqliteStore
from launchpad_lite.search._store import PART_BYTES
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
                await broker.submit("model", [TaskSubmission("1", bytes(1_000_000))])

    asyncio.run(submit())
    store.close()


def test_others_pass_what_is_large_on_its_way_into_the_store(
    broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = broker._store
    assert isinstance(store, SqliteStore)
    large = bytes(3 * PART_BYTES)
    wrote: list[str] = []
    stage, write = store.stage, store.write

    def note_part(key: str, what: str, body: bytes, part: int) -> bool:
        wrote.append(what)
        return stage(key, what, body, part)

    def note_write(changes: Changes) -> None:
        wrote.append("write")
        write(changes)

    monkeypatch.setattr(store, "stage", note_part)
    monkeypatch.setattr(store, "write", note_write)
    worker = Life("worker", "life")

    async def work() -> None:
        tasks = TaskSubmission("large", large), TaskSubmission("small", b"")
        await asyncio.gather(*(broker.submit("model", [each]) for each in tasks))
        assert wrote == ["payload", "write", "payload", "payload", "write"]
        found = await broker.work(worker, [], [], ["python"], 2, 1.0)
        assert found is not None
        wrote.clear()
        outcomes = [
            TaskOutcome(each.id, each.token, TaskState.DONE, each.payload) for each in found
        ]
        both = outcomes[1:] * 2, outcomes[:1]  # the large one once more, after a timeout
        await asyncio.gather(*(broker.hand_in(each) for each in both))
        assert wrote == ["result", "write", "result", "result", "write"]

    asyncio.run(work())
    store.close()
    again = SqliteStore(tmp_path / BROKERS / "broker[0].sqlite")
    found = {each.submission.id: each for each in again.load()}
    again.close()
    for key, body in {"large": large, "small": b""}.items():
        outcome = found[key].outcome
        assert found[key].submission.payload == body
        assert outcome is not None
        assert outcome.payload == body
