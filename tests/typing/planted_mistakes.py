"""Calls between nodes, right and wrong; type checkers must report exactly the lines marked.

Checked, never run.
"""

import concurrent.futures

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

# The API itself.
program.add_node(Range(0, 1), label="r")  # mistake
program.add_node(lp.CourierNode(3), label="r")  # mistake
program.add_node(lp.CourierNode(Consumer, [handle]), label=5)  # mistake
running = lp.launch(program, resources={"r": lp.Resources(cpu=2)}, notice_s=3.0)
lp.launch([program], "local_mt")
lp.launch(program, lp.LaunchType.LOCAL_MULTI_THREADING)
lp.launch("program")  # mistake
exit_code: int = running.wait().exit_code
outcome: str = running.wait(timeout_s=1.0).outcome  # mistake
stopped: bool = lp.wait_for_stop(1.0)
