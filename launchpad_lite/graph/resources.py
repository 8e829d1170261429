"""The resources that a node needs of its host."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from launchpad_lite.parts.settings import check_quantity, made_from


@dataclass(frozen=True)
class Resources:
    """The needs of each node of a group. None: no limit.

    Attributes:
        cpu: Number of cores, may be fractional. Whole cores are for this node alone.
        ram_gib: Main memory in GiB, of each process of the node; more is a MemoryError.
        gpu: Number of accelerators, each for this node alone; below 1 it shares one with other
            nodes that ask for a part. Its memory is not divided.

    Example:
        lp.launch(program, resources={"learner": lp.Resources(cpu=2, ram_gib=4, gpu=1)})
    """

    cpu: float | None = None
    ram_gib: float | None = None
    gpu: float | None = None

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if value is None:
                continue
            check_quantity(name, value)
            if name == "gpu" and float(value) > 1 and not float(value).is_integer():
                raise ValueError(f"gpu is a whole number, or below 1 to share one, not {value}")

    @classmethod
    def of(cls, given: object) -> "Resources":
        """Takes resources as users write them: `{"cpu": 2, "ram": 2, "gpu": 1}` too."""
        if isinstance(given, Mapping) and "ram" in given:  # as in Listing 1 of the paper
            if "ram_gib" in given:
                raise ValueError("ram and ram_gib mean the same; give one of them")
            given = {"ram_gib" if name == "ram" else name: given[name] for name in given}
        return made_from(cls, given, "lp.Resources", called="resource")

    def __str__(self) -> str:
        wishes = dataclasses.asdict(self).items()
        return ", ".join(f"{name}={value:g}" for name, value in wishes if value is not None)
