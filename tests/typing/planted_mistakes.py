"""Calls between nodes, right and wrong; type checkers must report exactly the lines marked.

Checked, never run. A mark names checkers that do otherwise: they miss a mistake, or report what is
right. docs/calls.md says what these lines are about.
"""

import concurrent.futures
import functools
import operator
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast, overload

import courier
import launchpad_lite as lp
from launchpad_lite import engines, search
from launchpad_lite.launching import Launcher
from tests.typing.served_elsewhere import Buffer

S = TypeVar("S")


class Range:
    """Serves numbers."""

    def __init__(self, start: int, end: int) -> None:
        self._numbers = list(range(start, end))
        self.double: Callable[[float], float] = lp.batched_handler(batch_size=8)(self._double)

    def produce(self, count: int = 1) -> list[int]:
        """Returns the first numbers."""
        return self._numbers[:count]

    def name(self) -> str:
        return "range"

    def count(self, by: int = 1) -> Iterator[int]:
        yield from self._numbers[::by]

    async def later(self, text: str) -> int:
        return len(text)

    async def count_later(self, by: int = 1) -> AsyncIterator[int]:
        for number in self._numbers[::by]:
            yield number

    def promise(self, text: str) -> "concurrent.futures.Future[int]":
        future: concurrent.futures.Future[int] = concurrent.futures.Future()
        future.set_result(len(text))
        return future

    def weights(self) -> courier.Shared[list[int]]:
        return courier.Shared(self._numbers)

    def same(self, value: S, *more: int) -> S:
        return value

    @overload
    def convert(self, value: int) -> str: ...
    @overload
    def convert(self, value: str) -> int: ...
    def convert(self, value: "int | str") -> "int | str":
        return value

    @courier.idempotent
    def look(self, key: str) -> int:
        return len(key)

    @lp.batched_handler(batch_size=8)
    def batched(self, values: list[str]) -> list[int]:
        return [len(value) for value in values]

    def _double(self, values: Any) -> Any:
        return 2 * values

    def __call__(self, value: int) -> str:
        return str(value)


def make(start: int) -> Range:
    return Range(start, start + 1)


def takes_int(value: int) -> None: ...


def takes_text(value: str) -> None: ...


def takes_ints(value: list[int]) -> None: ...


program = lp.Program("typed")
node = lp.CourierNode(Range, 0, 10)
handle = program.add_node(node, label="r")

# From the node to the client, and calls that wait.
client = handle.dereference()
client.produce()
client.produse()  # mistake
client.produce("3")  # mistake
takes_ints(client.produce(count=3))
takes_text(client.produce())  # mistake
takes_int(client.look("3"))
client.look(3)  # mistake
client.double("3")  # mistake
takes_text(client.double(3.0))  # mistake
client.batched("3")
handle.produce()  # mistake
found = cast("Range", courier.Client("127.0.0.1:4711"))
found.produse()  # mistake
elsewhere = program.add_node(lp.ExternalNode[Range]("127.0.0.1:4711"), label="elsewhere")
elsewhere.dereference().produse()  # mistake
made = functools.partial(Range, start=3)
of_partial = program.add_node(lp.CourierNode(made, end=3), label="made").dereference()
of_partial.produse()  # mistake, but not for: ty
courier.with_timeout(client, 5).produce()
courier.with_timeout(client, 5).produse()  # mistake
courier.with_timeout(client, "5")  # mistake

# A function that makes the object is as good as its class.
of_function = program.add_node(lp.CourierNode(make, 3), label="f").dereference()
of_function.produce()
of_function.produse()  # mistake

# Calls that do not wait.
takes_ints(courier.submit(client.produce, 2).result())
takes_text(courier.submit(client.produce, 2).result())  # mistake
courier.submit(client.produse, 2)  # mistake
courier.submit(client.produce, "2")  # mistake
courier.submit(client.produce(2))  # mistake
takes_int(courier.submit(client.later, "3").result())
takes_text(courier.submit(client.later, "3").result())  # mistake
takes_int(courier.submit(client.promise, "3").result())
takes_text(courier.submit(client.promise, "3").result())  # mistake
takes_ints(courier.submit(client.weights).result())
takes_text(courier.submit(client.weights).result())  # mistake
takes_text(courier.submit(client.convert, 3).result())  # right, but not for: ty
takes_text(courier.submit(client.convert, "3").result())  # mistake
courier.submit(client.convert, b"3")  # mistake, but not for: pyrefly
takes_int(courier.submit(client.same, 3, 4).result())
courier.submit(client.same, 3, "4")  # mistake
takes_text(courier.submit(client, 3).result())
courier.submit(client, "3")  # mistake
courier.submit(client.double, "3")  # mistake
for number in courier.submit(client.count, 2).result():
    takes_int(number)
    takes_text(number)  # mistake
for number in courier.submit(client.count_later, 2).result():
    takes_int(number)
    takes_text(number)  # mistake


# Calls for asyncio.
async def in_asyncio(source: Range) -> None:
    takes_ints(await courier.call_aio(source.produce, 2))
    takes_text(await courier.call_aio(source.produce, 2))  # mistake
    await courier.call_aio(source.produse, 2)  # mistake
    await courier.call_aio(source.produce, "2")  # mistake
    courier.call_aio(source.produce, 2)  # mistake, but not for: ty
    takes_ints(courier.call_aio(source.produce, 2))  # mistake
    takes_int(await courier.call_aio(source.later, "3"))
    takes_text(await courier.call_aio(source.later, "3"))  # mistake
    takes_int(await courier.call_aio(source.promise, "3"))
    takes_ints(await courier.call_aio(source.weights))
    takes_text(await courier.call_aio(source.convert, 3))  # right, but not for: ty
    await courier.call_aio(source.convert, b"3")  # mistake, but not for: pyrefly
    takes_text(await courier.call_aio(source, 3))
    async for number in courier.call_aio(source.count, 2):
        takes_int(number)
        takes_text(number)  # mistake
    async for number in courier.call_aio(source.count_later, 2):
        takes_int(number)
        takes_text(number)  # mistake
    await courier.call_aio(source.count, 2)  # mistake
    async for _ in courier.call_aio(source.produce, 2):  # mistake
        pass


# In a node: its arguments are clients where the program has handles.
class Consumer:
    def __init__(self, ranges: list[Range], buffer: Buffer[str]) -> None:
        self._ranges = ranges
        self._buffer = buffer

    def run(self) -> None:
        futures = [courier.submit(each.produce, 2) for each in self._ranges]
        for future in concurrent.futures.as_completed(futures):
            takes_ints(future.result())
        for each in self._ranges:
            each.consume()  # mistake
        self._buffer.add("3", first=True)
        self._buffer.add(3)  # mistake
        courier.submit(self._buffer.add, 3)  # mistake
        takes_ints(self._buffer.sample())  # mistake


# Generic classes, and those of other modules.
buffer = program.add_node(lp.CourierNode(Buffer[str], 10), label="buffer")
items: lp.Handle[Buffer[int]] = buffer  # mistake
buffer.dereference().add("3")
buffer.dereference().add(3)  # mistake
takes_ints(courier.submit(buffer.dereference().sample, 2).result())  # mistake
with program.group("range"):
    handles = [program.add_node(lp.CourierNode(Range, 0, end)) for end in range(3)]
handles[0].dereference().produse()  # mistake
consumer = program.add_node(lp.CourierNode(Consumer, handles, buffer), label="consumer")
consumer.dereference().runn()  # mistake

# Nodes that are added later.
declared: lp.Handle[Range] = program.declare("later")
declared.dereference().produce(2)
declared.dereference().produse()  # mistake
program.declare(3)  # mistake

# Colocations, cachers, and nodes that serve nothing.
inner = lp.CourierNode(Range, 0, 10)
silent = program.add_node(lp.ColocationNode([inner, lp.PyNode(make, 3)]), label="both")
inner.create_handle().dereference().produse()  # mistake
silent.dereference().produce()  # mistake
lp.ColocationNode([inner, inner.create_handle()])  # mistake
lp.ColocationNode([inner], "threads")  # mistake
cacher = program.add_node(lp.CacherNode(handle), label="cacher").dereference()
cacher.produce(2)
cacher.produse()  # mistake

# Pools.
pool = lp.Pool(handles).dereference()
pool.by_key("a").produce(2)
pool.by_key("a").produse()  # mistake
takes_ints(courier.submit(pool.by_key("a").produce, 2).result())
names = [courier.submit(each.name) for each in pool.clients]
takes_int(names[0].result())  # mistake
lp.Pool(handles, choose="random")  # mistake
lp.Pool(handle)  # mistake


class User:
    """Is given one pool twice: as one of the nodes in turn, and as all of them."""

    def __init__(self, one: Range, pool: "courier.Pool[Range]") -> None:
        one.produce(2)
        one.produse()  # mistake
        pool.by_key("a").produse()  # mistake
        takes_int(len(pool.all.produce()))


# Clients without the type of their object: their calls are not checked, their futures are.
bare = courier.Client("127.0.0.1:4711")
bare.produse(1, 2)
bare.futures.produce(2).result(1.0)
bare.futures.produce(2).reslut()  # mistake
courier.Client(4711)  # mistake


async def with_bare(bare: lp.CourierClient) -> None:
    takes_ints(await bare.aio.produce(2))
    async for _ in bare.aio.count():
        pass
    bare.aio.produce(2).result()  # mistake


# Parameter servers.
class Sgd(engines.ParameterServer):
    def initial(self) -> dict[str, float]:
        return {"weights": 0.5}

    def push(self, worker: str, values: dict[str, float]) -> dict[str, float]:
        return {"weights": 0.5 * values["weights"]}

    def pull(self, key: str, value: float, update: float) -> float:
        return value + update

    def schedule(self, workers: Sequence[str], more: int) -> Mapping[str, list[str]]:  # mistake
        return {}

    def stop(self) -> str:  # mistake
        return "no"


ps = Sgd().add_to(program, workers=8).dereference()
takes_int(ps.get("weights").version)
takes_int(ps.get("weights").versoin)  # mistake
ps.get()  # mistake
ps.set("weights")  # mistake
Sgd().add_to(program, workers="8")  # mistake


class Shards(engines.PeerToPeer):
    def initial(self) -> Mapping[str, float]:
        return {"weights": 0.5}

    def schedule(self) -> list[str]:
        return ["weights"]

    def push(self, values: Mapping[str, float]) -> Mapping[str, float]:
        return values

    def pull(self, key: str, value: float) -> float:  # mistake
        return value


Shards().add_to(program, peers=8).dereference().get("weights").versoin()  # mistake


# Datasets.
def counted(words: "engines.Dataset[str]") -> "engines.Dataset[tuple[str, int]]":
    words.map(lambda word: (word, 1)).reduce_by_key(len)  # mistake
    return words.map(lambda word: (word, 1)).reduce_by_key(operator.add)


# Executors.
def train(rate: float, steps: int = 10) -> str:
    return f"{rate} {steps}"


with search.Executor(workers=2) as executor:
    takes_text(executor.submit(train, 0.1, steps=3).result())
    takes_int(executor.submit(train, 0.1).result())  # mistake
    executor.submit(train, "0.1")  # mistake
    executor.submit(train, 0.1, step=3)  # mistake
    executor.submit(train, 0.1).cancel(kill=True)
    executor.submit(train, 0.1).cancel(kil=True)  # mistake
    takes_text(next(executor.map(train, [0.1, 0.2], chunksize=2)))
    takes_int(next(executor.map(train, [0.1, 0.2])))  # mistake
    takes_text(next(executor.map(train, [0.1, 0.2], [3, 4])))
    takes_text(next(executor.map(train, *[[1, 2], [3, 4]])))
    takes_int(next(executor.map(len, ["0.1"])))
    takes_int(next(executor.map(lambda rate: 3, [0.1])))
    takes_text(next(executor.map(functools.partial(train, steps=3), [0.1], ordered=False)))
    takes_ints(next(executor.map(Range(0, 1).produce, range(3))))
    executor.submit(Range, 0, 1).result().produce()
    executor.submit(Range, 0).result()  # mistake
    executor.map(train, ["0.1"])  # mistake
    executor.map(train, [0.1], chunk=2)  # mistake
    standard: concurrent.futures.Executor = executor


def on_mine(mine: Launcher) -> None:
    search.Executor(launcher=mine)
    search.Executor(launcher=Range)  # mistake


# The API itself.
program.add_node(Range(0, 1), label="r")  # mistake
program.add_node(lp.CourierNode(3), label="r")  # mistake
program.add_node(lp.CourierNode(Consumer, [handle]), label=5)  # mistake
running = lp.launch(program, resources={"r": lp.Resources(cpu=2)}, notice_s=3.0)
lp.launch([program], "local_mt")
lp.launch("program")  # mistake
exit_code: int = running.wait().exit_code
outcome: str = running.wait(timeout_s=1.0).outcome  # mistake
stopped: bool = lp.wait_for_stop(1.0)
