"""Members of a ring, in a simulated network: who owns what, while they crash, come and leave."""

import asyncio
import collections
import itertools
import pickle
import random
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from launchpad_lite.engines._member import Contact, ElsewhereError, GoneError, RingMember, key_place
from launchpad_lite.engines.errors import ValuesLostError
from tests.simulated_time import simulate

KEYS = range(12)
LOOK_S = 0.2


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - time passes at once here
        await asyncio.sleep(0.001)


class Watched(RingMember):
    """Shows what it has, and what the last one had that left."""

    def __init__(self, world: "World", *args: Any) -> None:
        super().__init__(*args)
        self._world = world

    def owns(self, key: int) -> bool:
        return self._own is not None and self._own.has(key_place(key))

    def is_after(self, contact: Contact) -> bool:
        return self._own is not None and self._own.before == contact

    def _fall_off(self) -> None:
        if self._own is not None and self._own.before is None:
            self._world.left.append({k: each.value for k, each in self._own.entries.items()})
        super()._fall_off()


class Process:
    """One life of a peer: joins, looks around, and makes updates."""

    def __init__(self, world: "World", contact: Contact) -> None:
        self.contact = contact
        self.updates = 0
        self.is_to_leave = False
        self._world = world
        self.member = Watched(world, contact, world.replicas, self._call, world.rng)
        self.tasks: set[asyncio.Task[Any]] = set()
        self.run(self._live())

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self.tasks.add(task)
        task.add_done_callback(self._note_end)
        return task

    def _note_end(self, task: asyncio.Task[Any]) -> None:
        self.tasks.discard(task)
        if not task.cancelled():
            task.exception()  # who called may be gone: nobody else looks at it

    async def _call(self, to: Contact, method: str, *args: Any) -> Any:
        if to.name == self.contact.name:
            return await self.handler(method)(*args)
        return await self._world.call(to.name, method, args)

    def handler(self, method: str) -> Any:
        return self.add if method == "add" else getattr(self.member, method)

    async def _live(self) -> None:
        tending = [self.run(self._tend(each)) for each in (self.member.look, self.member.mend)]
        if self.contact.life == 0 and self.contact.name == self._world.names[0]:
            self.member.begin(dict.fromkeys(KEYS, ()))
        while not self.is_to_leave:
            await self._try(self._join())
            if self.member.is_on_ring and self._world.makes_updates:
                await self._update()
            await asyncio.sleep(self._world.rng.uniform(0, 0.05))
        await self.member.leave()
        for task in tending:
            task.cancel()
        del self._world.processes[self.contact.name]

    async def _tend(self, method: Callable[[], Coroutine[Any, Any, None]]) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            await self._try(method())

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
                owner, _ = await self.member.find(key_place(key), entries)
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
        self.makes_updates = True
        self.lost: list[str] = []
        #: The values of each ring that ended.
        self.left: list[dict[int, Any]] = []
        #: Seconds that a request takes, and an answer, in the mean.
        self.delay_s = 0.002
        #: Seconds that an answer takes, by the name of the method.
        self.delays: dict[str, float] = {}
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

    async def begin(self) -> None:
        """Starts all that do not run, and waits until they are on the ring."""
        for name in self.names:
            if name not in self.processes:
                self.start(name)
        await self.quiet()

    def crash(self, name: str) -> None:
        process = self.processes.pop(name)
        for task in list(process.tasks):
            task.cancel()

    async def call(self, name: str, method: str, args: Any) -> Any:
        await asyncio.sleep(self.rng.expovariate(1 / self.delay_s))
        process = self.processes.get(name)
        if process is None or (method == "neighbours" and name in self.suspected):
            self.suspected.discard(name)
            await asyncio.sleep(0.01)
            raise GoneError(name)
        task = process.run(process.handler(method)(*pickle.loads(pickle.dumps(args))))
        await asyncio.wait({task})
        if task.cancelled():
            raise GoneError(name)
        await asyncio.sleep(self.delays.get(method, self.rng.expovariate(1 / self.delay_s)))
        return task.result()

    async def gone(self, names: list[str]) -> None:
        """Waits until these have left, or crashed."""
        for _ in range(2000):
            await asyncio.sleep(0.05)
            if not set(names) & self.processes.keys():
                return
        raise AssertionError(f"{set(names) & self.processes.keys()} do not get away")

    async def leave(self, names: list[str]) -> None:
        """Has some leave, at the same time or one soon after the other."""
        pause_s = self.rng.choice([0, 0.002, 0.02])
        for name in names:
            self.processes[name].is_to_leave = True
            await asyncio.sleep(self.rng.uniform(0, pause_s))

    async def end(self) -> None:
        for name in list(self.processes):
            self.crash(name)
        await asyncio.sleep(0)

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
            owner, _ = await member.find(key_place(key), self.contacts(""))
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
        self.compare(await self.values(), acked)

    def compare(self, values: dict[int, Any], acked: set[Any]) -> None:
        """No acknowledged update is lost, and none is there twice."""
        found = [token for value in values.values() for token in value]
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
        await world.begin()
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
            await world.begin()
        await world.check()
        await world.end()

    simulate(main())


def test_a_change_beside_a_leave_survives_the_crash_of_its_owner() -> None:
    world = World(0, 4, 2)

    async def main() -> None:
        await world.begin()
        world.makes_updates = False
        await asyncio.sleep(LOOK_S)
        _, owner, leaving, following = sorted(
            world.processes.values(), key=lambda each: each.contact.place
        )
        key = next(k for k in itertools.count() if owner.member.owns(k))
        world.delays["inherit"] = LOOK_S / 2
        leaving.is_to_leave = True
        await until(lambda: following.member.is_after(owner.contact))
        await owner.member.put(key, "changed")
        await until(lambda: leaving.contact.name not in world.processes)
        world.crash(owner.contact.name)  # before it looks at its neighbours again
        await until(lambda: following.member.owns(key))
        assert await following.member.read(key) == ("changed", 0)
        await world.end()

    simulate(main())


@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize(
    "seed", [0, *[pytest.param(seed, marks=pytest.mark.slow) for seed in (8, 26, *range(1, 8))]]
)
def test_many_leave_at_a_time_while_others_crash(seed: int, replicas: int) -> None:
    world = World(seed, 9, replicas)

    async def main() -> None:
        for _ in range(4):
            await world.begin()
            leaving = world.rng.sample(world.names, world.rng.randrange(1, 8))
            await world.leave(leaving)
            others = [name for name in world.processes if name not in leaving]
            for name in world.rng.sample(others, min(replicas, len(others)) - 1):
                await asyncio.sleep(world.rng.uniform(0, 0.05))
                world.crash(name)
            await world.gone(leaving)
            await world.quiet()
            await world.check()
        everybody = list(world.processes)
        await world.leave(everybody)
        await world.gone(everybody)
        assert world.lost == []
        [values] = world.left
        world.compare(values, world.acked)

    simulate(main())


@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize(
    "seed", [*range(5), *[pytest.param(seed, marks=pytest.mark.slow) for seed in range(5, 25)]]
)
def test_all_leave_as_soon_as_they_are_there(seed: int, replicas: int) -> None:
    world = World(seed, random.Random(seed).randrange(2, 12), replicas)
    world.delay_s = world.rng.choice([0.0005, 0.002, 0.02, 0.1])

    async def main() -> None:
        for name in world.names:
            world.start(name)
        await until(lambda: all(p.member.is_on_ring for p in world.processes.values()))
        await world.leave(world.names)
        await world.gone(world.names)
        assert world.lost == []
        [values] = world.left
        world.compare(values, world.acked)

    simulate(main())
