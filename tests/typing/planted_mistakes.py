"""Calls between nodes, right and wrong; type checkers must report exactly the lines marked.

Checked, never run.
"""

import concurrent.futures
from collections.abc import Iterator
from typing import overload

import courier
import launchpad_lite as lp


class Range:
    """Serves numbers."""

    def __init__(self, start: int, end: int) -> None:
        self._numbers = list(range(start, end))

    def produce(self, count: int = 1) -> list[int]:
        return self._numbers[:count]

    def name(self) -> str:
        return "range"

    @property
    def numbers(self) -> list[int]:
        return self._numbers

    def count(self) -> Iterator[int]:
        yield from self._numbers

    def later(self, text: str) -> "concurrent.futures.Future[int]":
        future: concurrent.futures.Future[int] = concurrent.futures.Future()
        future.set_result(len(text))
        return future

    @overload
    def convert(self, value: int) -> str: ...
    @overload
    def convert(self, value: str) -> int: ...
    def convert(self, value: "int | str") -> "int | str":
        return value


class Consumer:
    """Is given clients of ranges where the program has handles."""

    def __init__(self, ranges: "list[Range]") -> None:
        self._ranges = ranges

    def run(self) -> None:
        for each in self._ranges:
            each.produce(2)
            each.consume()  # mistake


def make(start: int) -> Range:
    return Range(start, start + 1)


program = lp.Program("typed")
node = lp.CourierNode(Range, 0, 10)
handle = program.add_node(node, label="r")
client = handle.dereference()
client.produce()
client.produse()  # mistake
client.produce("3")  # mistake
client.produce(1, 2)  # mistake
numbers: list[int] = client.produce(count=3)
text: str = client.produce()  # mistake

node.create_handle().dereference().name().upper()
node.create_handle().dereference().name().uper()  # mistake

# A function that makes the object is as good as its class.
of_function = program.add_node(lp.CourierNode(make, 3), label="f").dereference()
of_function.produce()
of_function.produse()  # mistake

# Calls that do not wait.
future = courier.submit(client.produce, 2)
result: list[int] = future.result()
wrong_result: str = future.result()  # mistake
right_type: concurrent.futures.Future[str] = courier.submit(client.name)
courier.submit(client.produce, "2")  # mistake
courier.submit(client.produce, amount=2)  # mistake


def takes_numbers(numbers: list[int]) -> None: ...


def takes_length(length: int) -> None: ...


async def in_asyncio() -> None:
    takes_numbers(await courier.call_aio(client.produce, 2))
    takes_numbers(await courier.call_aio(client.name))  # mistake
    await courier.call_aio(client.produce, "2")  # mistake


# Clients whose calls are made in all ways. What their calls take and return is known to mypy alone.
class Actor:
    def __init__(self, source: lp.Remote[Range]) -> None:
        self._source = source

    async def run(self) -> None:
        source = self._source
        takes_numbers(source.produce(2))
        takes_numbers(source.futures.produce(count=2).result(1.0))
        takes_numbers(await source.aio.produce(2))
        takes_length(source.later("3"))
        takes_length(await source.aio.later("3"))
        takes_length(source.convert("3"))
        for number in source.count():
            takes_length(number)
        async for number in await source.aio.count():
            takes_length(number)
        source.futures.produce().reslut()  # mistake
        source.aio.produce().result()  # mistake
        takes_length(source.produce())  # mistake for the plug-in
        source.produse()  # mistake for the plug-in
        source.produce("3")  # mistake for the plug-in
        source.numbers()  # mistake for the plug-in
        takes_length(source.convert(3))  # mistake for the plug-in
        source.futures.produse()  # mistake for the plug-in
        source.futures.produce(1, 2)  # mistake for the plug-in
        takes_length(source.futures.produce().result())  # mistake for the plug-in
        await source.aio.produse()  # mistake for the plug-in
        await source.aio.produce(amount=2)  # mistake for the plug-in
        takes_length(await source.aio.produce())  # mistake for the plug-in


program.add_node(lp.CourierNode(Actor, handle), label="actor")
remote = courier.as_remote(client)
result = remote.futures.produce().result()
remote.futures.produse()  # mistake for the plug-in
given: courier.Remote[Range] = courier.Client("127.0.0.1:4711")
courier.as_remote(client).poduce()  # mistake for the plug-in

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
