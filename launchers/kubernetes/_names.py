"""Valid and unique names of a run's objects, pods and hosts, for any names of program and groups."""

import hashlib
import re
import secrets
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

#: No vowels, so that no words appear, and no characters that look alike, so that users can read a
#: name aloud.
_RANDOM = "bcdfghjklmnpqrstvwxz2456789"
_RANDOM_CHARACTERS = 5
#: The most characters of the program in a name that we choose; the rest is for the groups.
_MOST_OF_PROGRAM = 24
_MOST_OF_RUN = 40
#: A pod's name is its Job's name and up to `-0-99999-abcde`, of at most 63 characters in all.
_MOST_OF_GROUP = 49
_DIGEST_CHARACTERS = 6
_DNS_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_LABEL_VALUE = re.compile(r"[A-Za-z0-9]([-_.A-Za-z0-9]{0,61}[A-Za-z0-9])?")
_MOST_OF_LABEL = 63
#: Names of our own objects, and labels that look like others with their digest.
_TAKEN = re.compile(r"supervisor|order|trust|work-\d+|.*-[0-9a-f]{6}")


@dataclass(frozen=True)
class Names:
    """The names of one run, by the label of each group.

    The first object and the supervisor's Service, by which pods find it, have that of the run. A
    JobSet names its Jobs by rules of its own.
    """

    run: str
    program: str
    groups: Mapping[str, str]
    jobset: bool = False

    @classmethod
    def of(
        cls, program: str, labels: Iterable[str], run: str | None = None, *, jobset: bool = False
    ) -> "Names":
        """Names a run; the names are the same for the same program, groups and run.

        Raises:
            ValueError: No object can have the name of the run.
        """
        if run is None:
            run = _new_run(program)
        elif len(run) > _MOST_OF_RUN or not _DNS_1035.fullmatch(run):
            raise ValueError(
                f"a run on Kubernetes is named with at most {_MOST_OF_RUN} lower-case letters, "
                f"digits and dashes, from a letter to a letter or digit, not {run!r}"
            )
        room = _MOST_OF_GROUP - len(run) - 1
        groups = {label: f"{run}-{_slug(label, room)}" for label in labels}
        if not _LABEL_VALUE.fullmatch(program):
            program = _with_digest(program, _MOST_OF_LABEL, "program")
        return cls(run, program, groups, jobset)

    @property
    def supervisor_job(self) -> str:
        return f"{self.run}-supervisor-0" if self.jobset else self.run

    @property
    def root_kind(self) -> str:
        """Kind of the object that owns all others; its name is `run`."""
        return "JobSet" if self.jobset else "Job"

    @property
    def trust(self) -> str:
        return f"{self.run}-trust"

    @property
    def order(self) -> str:
        return f"{self.run}-order"

    def work(self, part: int) -> str:
        return f"{self.run}-work-{part}"

    def slug(self, label: str) -> str:
        """Returns the short name of a group in names and labels."""
        return self.groups[label][len(self.run) + 1 :]

    def job(self, label: str) -> str:
        """Returns the name of the Job of a group, as the cluster has it."""
        return f"{self.groups[label]}-0" if self.jobset else self.groups[label]

    def host(self, label: str, replica: int) -> str:
        """Returns the host name of a node's pod, which it keeps when it is replaced."""
        return f"{self.job(label)}-{replica}"

    def address(self, label: str, replica: int) -> str:
        """Returns the name by which a node's pod is found in the namespace."""
        return f"{self.host(label, replica)}.{self.groups[label]}"

    def describe(self, kind: str, name: str) -> str:
        """Returns a description of an object that users understand; they never see most of its names."""
        for label, own in self.groups.items():
            if name in (own, self.job(label)):
                return f"{kind} of group {label!r}"
        if name in (self.run, self.supervisor_job):
            return f"{kind} of the {'supervisor' if kind in ('Job', 'Service') else 'run'}"
        return f"{kind} {name}"


def _new_run(program: str) -> str:
    plain = _plain(program)
    if not plain[:1].isalpha():
        plain = f"p-{plain}" if plain else "program"
    end = "".join(secrets.choice(_RANDOM) for _ in range(_RANDOM_CHARACTERS))
    return f"{plain[:_MOST_OF_PROGRAM].rstrip('-')}-{end}"


def _slug(label: str, room: int) -> str:
    is_slug = label and label == _plain(label) and len(label) <= room
    return label if is_slug and not _TAKEN.fullmatch(label) else _with_digest(label, room, "g")


def _with_digest(text: str, room: int, otherwise: str) -> str:
    """Returns a slug that differs also for texts whose plain characters are the same."""
    # Lone surrogates are valid in Python's strings, and must not raise here.
    seed = text.encode("utf-8", "surrogatepass")
    digest = hashlib.sha256(seed).hexdigest()[:_DIGEST_CHARACTERS]
    plain = _plain(text)[: room - _DIGEST_CHARACTERS - 1].rstrip("-")
    return f"{plain or otherwise}-{digest}"


def _plain(text: str) -> str:
    """Returns what is left of a text in lower-case letters, digits and single dashes."""
    letters = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode().lower()
    return re.sub(r"[^a-z0-9]+", "-", letters).strip("-")
