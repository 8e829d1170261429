"""What a supervisor in a job or pod is to run: one blob, and the program that runs there first.

`begin.py` unpickles nothing before the digest of the blob agrees with `order.json`: so it finds one
that is incomplete or was replaced. The place of `order.json` guarantees that the user wrote it: a
Secret in a cluster, a folder of this user only for Slurm.
"""

import dataclasses
import hashlib
import json
import pickle
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from courier import dumps
from launchers.host import boot
from launchers.hosts.shipping import Shipment, Tree
from launchpad_lite.launching import LaunchOptions, LaunchPlan
from launchpad_lite.process.flag_values import FlagSnapshot
from launchpad_lite.process.script import Script

#: Appended to the text of `launchers.host.boot`, whose code cache it uses. Both run without our packages.
_BEGIN = '''

def fetch(source):
    """Returns the blob from a URL, or from files in the order of their names."""
    if isinstance(source, str):
        import urllib.request
        with urllib.request.urlopen(source, timeout=300) as answer:
            return answer.read()
    import pathlib
    folder, pattern = source
    found = sorted(pathlib.Path(folder).glob(pattern)) or [pathlib.Path(folder, pattern)]
    return b"".join(each.read_bytes() for each in found)


def prepare(order):
    """Makes the code of the program importable; returns its supervisor, and the members of the blob."""
    if list(sys.version_info[:2]) != order["python"]:
        raise ImportError(
            "the program was launched by Python %d.%d; there is Python %d.%d, %s,"
            % (tuple(order["python"]) + sys.version_info[:2] + (sys.executable,))
        )
    blob = fetch(order["source"])
    if hashlib.sha256(blob).hexdigest() != order["digest"]:
        raise ValueError("the work of the program is not what was launched: its digest differs")
    import pickle
    members = pickle.loads(blob)
    cache = _CodeCache(order["cache"])
    for key in order["trees"]:
        if not cache.has_tree(key):
            cache.add_tree(key, members[key])
    sys.path[:1] = [cache.tree(key) for key in order["trees"]]
    import importlib
    return importlib.import_module(order["supervisor"]).main, members


def begin(folder, failure):
    """Becomes the supervisor of the program; if that fails, writes the reason to a file, if one is named."""
    try:
        with open(os.path.join(folder, "order.json")) as file:
            order = json.load(file)
        supervise, members = prepare(order)
    except Exception as error:
        text = "%s: %s" % (type(error).__name__, error)
        if isinstance(error, ImportError):
            text = "%s %s" % (error, order["advice"])
        if failure:
            path = os.path.join(folder, failure)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path + ".new", "w") as file:
                json.dump(text, file)
            os.replace(path + ".new", path)  # complete as soon as it is there
        sys.exit(text)
    sys.exit(supervise(folder, members))

'''


@dataclass(frozen=True, kw_only=True)
class Order:
    """What a supervisor is to run, without the work, which loads only with the user's code.

    `main` of the module `supervisor` takes the folder that it begins in and what is in the blob.
    `advice` is for errors: where the supervisor runs, and what to do if Python there lacks
    packages. The file `failure`, if any, is for the reason why it cannot begin.
    """

    supervisor: ClassVar[str]
    advice: ClassVar[str]
    failure: ClassVar[str] = ""

    plan: LaunchPlan
    options: LaunchOptions
    trees: tuple[str, ...] = ()  # keys of the code in the blob; set by `pack`, as is the next
    requires: Mapping[str, str] = field(default_factory=dict)
    argv: tuple[str, ...] = field(default_factory=lambda: tuple(sys.argv))
    script: Script = field(default_factory=Script.here)
    flags: FlagSnapshot = field(default_factory=FlagSnapshot.take)

    def stand_in(self) -> None:
        """Gives this process the arguments, script and flags of the launching one, for the user's code."""
        sys.argv[:] = self.argv
        self.script.stand_in()
        self.flags.apply()

    def with_work(self, members: dict[str, bytes]) -> LaunchPlan:
        """Returns the plan with its work, which it removes from `members`. The user's code must be importable."""
        return self.plan.with_works(pickle.loads(members.pop("work")))

    def shipment(self, members: Mapping[str, bytes]) -> Shipment:
        trees = tuple(Tree(key, {}, members[key]) for key in self.trees)
        return Shipment(trees, self.requires)


def pack(
    order: Order,
    plan: LaunchPlan,
    shipment: Shipment,
    source: str | tuple[str, str],
    cache: str | None,
) -> tuple[dict[str, bytes], bytes]:
    """Returns the files of the folder in which a supervisor begins, and the blob.

    `source` says where the blob will lie there: a URL, or a folder and a pattern of names.
    """
    trees = tuple(tree.key for tree in shipment.trees)
    members = {
        "order": dumps(dataclasses.replace(order, trees=trees, requires=shipment.requires)),
        "work": dumps(plan.works),
        **{tree.key: tree.archive() for tree in shipment.trees},
    }
    blob = pickle.dumps(members)
    words = {
        "supervisor": order.supervisor,
        "advice": order.advice,
        "python": sys.version_info[:2],
        "trees": trees,
        "digest": hashlib.sha256(blob).hexdigest(),
        "source": source,
        "cache": cache,
    }
    here = "os.path.dirname(os.path.abspath(__file__))"
    begin = f"{Path(boot.__file__).read_text()}{_BEGIN}\nbegin({here}, {order.failure!r})\n"
    files = {"begin.py": begin.encode(), "order.json": json.dumps(words, indent=2).encode()}
    return files, blob
