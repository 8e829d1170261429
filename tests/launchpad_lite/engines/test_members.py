"""Members of a ring, in a simulated network: who owns what, while they crash, come and leave."""

import asyncio
import collections
import pickle
import random
import selectors
from collections.abc import Coroutine
from typing import Any

import pytest

from launchpad_lite.engines._member import ElsewhereError, GoneError, Member, key_place
from launchpad_lite.engines._ring import Contact
from launchpad_lite.engines.errors import ValuesLostError

KEYS = range(12)
LOOK_S = 0.2


class _Clock(selectors.SelectSelector):
    """Lets time pass at once."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        assert timeout is not None, "nothing happens any more"
        self.now += timeout
        return []


def simulate(main: Coroutine[Any, Any, None]) -> None:
    """Runs a coroutine, in simulated time."""
    clock = _Clock()
    loop = asyncio.SelectorEventLoop(clock)
    loop.time = lambda: clock.now  # type: ignore[method-assign]
    try:
        loop.run_until_complete(main)
    finally:
        loop.close()


class Process:
    """One life of a peer: joins, looks around, and makes updates."""

    def __init__(self, world: "World", contact: Contact) -> None:
        self.contact = contact
        self.updates = 0
        self.is_to_leave = False
        self._world = world
        self.member = Member(contact, world.replicas, self._call, world.rng)
        self.tasks: set[asyncio.Task[Any]] = set()
        self.run(self._live())

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    async def _call(self, to: Contact, method: str, *args: Any) -> Any:
        if to.name == self.contact.name:
            return await self.handler(method)(*args)
        return await self._world.call(to.name, method, args)

    def handler(self, method: str) -> Any:
        return self.add if method == "add" else getattr(self.member, method)

    async def _live(self) -> None:
        looking = self.run(self._look())
        if self.contact.life == 0 and self.contact.name == self._world.names[0]:
            self.member.begin(dict.fromkeys(KEYS, ()))
        while not self.is_to_leave:
            await self._try(self._join())
            if self.member.is_on_ring:
                await self._update()
            await asyncio.sleep(self._world.rng.uniform(0, 0.05))
        await self.member.leave()
        looking.cancel()
        del self._world.processes[self.contact.name]

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            await self._try(self.member.look())

    async def _try(self, coroutine: Coroutine[Any, Any, None]) -> None:
        try:
            await coroutine
        except (ElsewhereError, GoneError):
            pass
        except ValuesLostError as error:
            self._world.lost.append(str(error))

    async def _update(self) -> None:
        key = self._world.rng.choice(KEYS)
        token = (self.contact.name, self.contact.life, self.updates)
        self._world.sent.add(token)
        while True:
            entries = [self.contact, *self._world.contacts(self.contact.name)]
            try:
                owner, _, _ = await self.member.find(key_place(key), entries)
                await self._call(owner, "add", key, token)
            except (ElsewhereError, GoneError):
                await self._try(self._join())
                await asyncio.sleep(0.01)
            else:
                self._world.acked.add(token)
                self.updates += 1
                return

    async def _join(self) -> None:
        if not self.member.is_on_ring:
            await self.member.join(self._world.contacts(self.contact.name))

    async def add(self, key: int, token: tuple[str, int, int]) -> None:
        async def append(value: Any) -> Any:
            await asyncio.sleep(0.001)
            return (*value, token)

        name, life, number = token
        await self.member.update(key, name, (life, number), append)


class World:
    """Processes, and the network between them."""

    def __init__(self, seed: int, peers: int, replicas: int) -> None:
        self.rng = random.Random(seed)
        self.replicas = replicas
        self.names = [f"peer[{number}]" for number in range(peers)]
        self.processes: dict[str, Process] = {}
        self.sent: set[Any] = set()
        self.acked: set[Any] = set()
        self.lost: list[str] = []
        #: Who seems to be gone to the next one that asks.
        self.suspected: set[str] = set()
        self._lives: collections.Counter[str] = collections.Counter()

    def contacts(self, but: str) -> list[Contact]:
        others = [Contact(name) for name in self.names if name != but]
        self.rng.shuffle(others)
        return others

    def start(self, name: str) -> None:
        contact = Contact(name, self._lives[name])
        self._lives[name] += 1
        self.processes[name] = Process(self, contact)

    def crash(self, name: str) -> None:
        process = self.processes.pop(name)
        for task in list(process.tasks):
            task.cancel()

    async def call(self, name: str, method: str, args: Any) -> Any:
        await asyncio.sleep(self.rng.expovariate(500))
        process = self.processes.get(name)
        if process is None or (method == "neighbours" and name in self.suspected):
            self.suspected.discard(name)
            await asyncio.sleep(0.01)
            raise GoneError(name)
        task = process.run(process.handler(method)(*pickle.loads(pickle.dumps(args))))
        await asyncio.wait({task})
        if task.cancelled():
            raise GoneError(name)
        await asyncio.sleep(self.rng.expovariate(500))
        return task.result()

    async def quiet(self) -> None:
        """Waits until all that run are on the ring."""
        for _ in range(2000):
            await asyncio.sleep(0.05)
            if all(each.member.is_on_ring for each in self.processes.values()):
                break
        else:
            off = [n for n, each in self.processes.items() if not each.member.is_on_ring]
            raise AssertionError(f"{off} are not on the ring")
        await asyncio.sleep(5 * LOOK_S)

    async def values(self) -> dict[int, Any]:
        member = next(iter(self.processes.values())).member
        found = {}
        for key in KEYS:
            owner, _, _ = await member.find(key_place(key), self.contacts(""))
            found[key], version = await self.call(owner.name, "read", (key,))
            assert version == len(found[key])
        return found

    async def check(self) -> None:
        """No acknowledged update is lost, none is there twice, and nobody is stuck."""
        assert self.lost == []
        before = {name: each.updates for name, each in self.processes.items()}
        await asyncio.sleep(2.0)
        stuck = [n for n, each in self.processes.items() if each.updates == before[n]]
        assert stuck == []
        acked = set(self.acked)
        found = [token for value in (await self.values()).values() for token in value]
        assert len(set(found)) == len(found)
        assert acked - set(found) == set()
        assert set(found) <= self.sent


@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize(
    "seed", [0, *[pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 10)]]
)
def test_no_acknowledged_update_is_lost_or_applied_twice(seed: int, replicas: int) -> None:
    world = World(seed, 7, replicas)

    async def main() -> None:
        for name in world.names:
            world.start(name)
        await world.quiet()
        for _ in range(8):
            await asyncio.sleep(world.rng.uniform(0, 1))
            names = list(world.processes)
            if world.rng.random() < 0.4:
                for name in world.rng.sample(names, world.rng.randrange(1, 4)):
                    world.processes[name].is_to_leave = True
                await asyncio.sleep(world.rng.uniform(0, 3))
            else:
                for name in world.rng.sample(names, world.rng.randrange(1, replicas)):
                    if world.rng.random() < 0.3:
                        world.suspected.add(name)
                    else:
                        world.crash(name)
                await asyncio.sleep(world.rng.uniform(0, 0.5))
            for name in world.names:
                if name not in world.processes:
                    world.start(name)
            await world.quiet()
        await world.check()
        for name in list(world.processes):
            world.crash(name)
        await asyncio.sleep(0)

    simulate(main())
