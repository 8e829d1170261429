"""Objects of a Kubernetes API, their versions, and what changed: in memory, with no rules of kinds.

Objects are JSON as Python has it. What the store gives out is its own and is not to be changed;
`update` hands out a copy for that.
"""

import copy
import secrets
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Any

Object = dict[str, Any]

_LETTERS = "bcdfghjklmnpqrstvwxz2456789"


@dataclass(frozen=True)
class Resource:
    """A collection of the API."""

    plural: str
    group: str
    version: str
    kind: str

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def qualified(self) -> str:
        """As messages of the API server name it."""
        return f"{self.plural}.{self.group}" if self.group else self.plural


RESOURCES = {
    one.plural: one
    for one in (
        Resource("pods", "", "v1", "Pod"),
        Resource("secrets", "", "v1", "Secret"),
        Resource("services", "", "v1", "Service"),
        Resource("events", "", "v1", "Event"),
        Resource("jobs", "batch", "v1", "Job"),
        Resource("networkpolicies", "networking.k8s.io", "v1", "NetworkPolicy"),
        Resource("jobsets", "jobset.x-k8s.io", "v1alpha2", "JobSet"),
    )
}


class ApiError(Exception):
    """An answer of the API other than success."""

    def __init__(
        self, code: int, reason: str, message: str, details: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(message)
        self.code = code
        self.status: Object = {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": message,
            "reason": reason,
            "details": dict(details or {}),
            "code": code,
        }


@dataclass(frozen=True)
class Change:
    version: int
    kind: str
    """ADDED, MODIFIED or DELETED."""
    resource: str
    old: Object | None
    new: Object


def now() -> datetime:
    return datetime.now(timezone.utc)


def stamp(time: datetime | None = None) -> str:
    return (time or now()).strftime("%Y-%m-%dT%H:%M:%SZ")


def random_suffix() -> str:
    return "".join(secrets.choice(_LETTERS) for _ in range(5))


def owned_by(item: Mapping[str, Any], uid: str) -> bool:
    """Whether this owner is the controller of an object."""
    owners = item["metadata"].get("ownerReferences") or []
    return any(owner["uid"] == uid and owner.get("controller") for owner in owners)


class Store:
    """All objects; thread-safe.

    Attributes:
        changed: Notified with each change; its lock guards all.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.version = 1000
        self._objects: dict[tuple[str, str, str], Object] = {}
        self._changes: list[Change] = []

    def create(self, resource: str, item: Mapping[str, Any], *, is_dry: bool = False) -> Object:
        """Returns a new object with its identity; raises ApiError where the name is taken."""
        known = RESOURCES[resource]
        with self.changed:
            new = copy.deepcopy(dict(item))
            new["apiVersion"], new["kind"] = known.api_version, known.kind
            metadata = new["metadata"]
            key = (resource, metadata["namespace"], metadata["name"])
            if key in self._objects:
                message = f'{known.qualified} "{key[2]}" already exists'
                raise ApiError(409, "AlreadyExists", message)
            metadata.setdefault("uid", str(uuid.uuid4()))
            metadata["creationTimestamp"] = stamp()
            metadata.pop("deletionTimestamp", None)
            if is_dry:
                return new
            self._objects[key] = new
            self._note("ADDED", resource, None, new)
            return new

    def get(self, resource: str, namespace: str, name: str) -> Object:
        with self.changed:
            found = self.find(resource, namespace, name)
        if found is None:
            message = f'{RESOURCES[resource].qualified} "{name}" not found'
            raise ApiError(404, "NotFound", message)
        return found

    def find(self, resource: str, namespace: str, name: str) -> Object | None:
        with self.changed:
            return self._objects.get((resource, namespace, name))

    def items(self, resource: str, namespace: str | None = None) -> list[Object]:
        """All objects of a kind by name; of every namespace with None."""
        with self.changed:
            found = [
                item
                for (kind, place, _), item in self._objects.items()
                if kind == resource and namespace in (None, place)
            ]
        return sorted(found, key=lambda item: str(item["metadata"]["name"]))

    def all(self) -> Iterator[tuple[str, Object]]:
        with self.changed:
            return iter([(key[0], item) for key, item in self._objects.items()])

    def update(
        self,
        resource: str,
        namespace: str,
        name: str,
        change: Callable[[Object], object],
        *,
        uid: str | None = None,
    ) -> Object:
        """Changes a copy of an object and stores it; without a change there is no new version.

        Raises:
            ApiError: 404 where there is none, or another with this name.
        """
        with self.changed:
            old = self.get(resource, namespace, name)
            if uid is not None and old["metadata"]["uid"] != uid:
                self.get(resource, namespace, f"{name} (uid {uid})")
            new = copy.deepcopy(old)
            change(new)
            if new == old:
                return old
            if self._is_over(resource, new):
                return self._remove(resource, new)
            self._objects[resource, namespace, name] = new
            self._note("MODIFIED", resource, old, new)
            return new

    def delete(
        self,
        resource: str,
        namespace: str,
        name: str,
        *,
        grace_s: int | None = None,
        uid: str | None = None,
    ) -> Object:
        """Begins the deletion of an object, and ends it where nothing keeps the object.

        Args:
            resource: Its kind.
            namespace: Where it is.
            name: Its name.
            grace_s: For pods; None: as their spec says.
            uid: If given, of this object only.
        """

        def mark(item: Object) -> None:
            metadata = item["metadata"]
            grace = 0
            if resource == "pods":
                spec = item["spec"]
                grace = spec["terminationGracePeriodSeconds"] if grace_s is None else grace_s
                phase = item.get("status", {}).get("phase")
                if "nodeName" not in spec or phase in ("Succeeded", "Failed"):
                    grace = 0
            if "deletionTimestamp" in metadata:  # it may only come sooner
                grace = min(grace, metadata.get("deletionGracePeriodSeconds", 0))
                if grace == metadata.get("deletionGracePeriodSeconds"):
                    return
            metadata["deletionTimestamp"] = stamp(now() + timedelta(seconds=grace))
            metadata["deletionGracePeriodSeconds"] = grace

        return self.update(resource, namespace, name, mark, uid=uid)

    def drop(self, resource: str, item: Object) -> None:
        """Removes an object at once, whatever keeps it."""
        with self.changed:
            metadata = item["metadata"]
            found = self.find(resource, metadata.get("namespace", ""), metadata["name"])
            if found is not None and found["metadata"]["uid"] == metadata["uid"]:
                self._remove(resource, copy.deepcopy(found))

    def changes_since(self, version: int) -> list[Change]:
        """All changes after a version, oldest first."""
        with self.changed:
            index = len(self._changes)
            while index and self._changes[index - 1].version > version:
                index -= 1
            return self._changes[index:]

    def _is_over(self, resource: str, item: Object) -> bool:
        metadata = item["metadata"]
        if "deletionTimestamp" not in metadata or metadata.get("finalizers"):
            return False
        return resource != "pods" or metadata["deletionGracePeriodSeconds"] == 0

    def _remove(self, resource: str, item: Object) -> Object:
        metadata = item["metadata"]
        old = self._objects.pop((resource, metadata["namespace"], metadata["name"]))
        self._note("DELETED", resource, old, item)
        return item

    def _note(self, kind: str, resource: str, old: Object | None, new: Object) -> None:
        self.version += 1
        new["metadata"]["resourceVersion"] = str(self.version)
        self._changes.append(Change(self.version, kind, resource, old, new))
        self.changed.notify_all()
