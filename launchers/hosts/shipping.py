"""Finds the code that a host with only Python lacks. Starts and sends nothing.

Nodes use the modules that their pickled work names, and what these import, which is read from the
sources. Installed code is not sent. It is listed with its versions, for the host's own environment.
"""

import ast
import contextlib
import functools
import gzip
import hashlib
import importlib.machinery
import importlib.metadata
import importlib.util
import io
import itertools
import os
import pickletools
import stat
import sys
import sysconfig
import tarfile
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from courier import dumps
from courier.lowlevel import SCRIPT_NAMES
from launchpad_lite.errors import LaunchError
from launchpad_lite.launching import Executable
from launchpad_lite.process.set_up import pickled

#: What an agent and its workers import, outside the standard library. Without grpc and protobuf:
#: our own clients do not need them.
_RUNTIME = ("absl", "cloudpickle", "courier", "launchers", "launchpad_lite", "psutil")
#: Our own packages, and the distributions of the others.
_OURS = ("courier", "launchers", "launchpad_lite")
_DEPENDENCIES = ("absl-py", "cloudpickle", "psutil")
#: Folders of installed packages have these names, in any environment.
_INSTALLED = frozenset(("site-packages", "dist-packages"))
#: The package of launchpad-lite-compat. It is sent even if installed, as it is small, and our wheel has it.
_COMPAT = "launchpad"
_STDLIB = f"{sysconfig.get_path('stdlib')}{os.sep}"
#: Code is small. A larger amount is data that lies beside the code, or a wrong folder.
_MAX_BYTES = 100_000_000


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Turns errors of the file system into ones that say what to do."""
    try:
        yield
    except OSError as error:
        raise LaunchError(
            f"{error.filename} must be sent to the hosts, as nodes import what it is part of, and cannot be "
            f"read ({error.strerror}); make it readable, or move it out of the package"
        ) from error


@dataclass(frozen=True)
class Tree:
    """A folder for the host's `sys.path`; its key is a digest of names, modes and contents."""

    key: str
    files: Mapping[str, Path] = field(repr=False)  # by the path below the folder
    packed: bytes | None = field(default=None, repr=False)  # if another process has made it

    @_explained()
    def archive(self) -> bytes:
        """Returns the files as `.tar.gz`, byte for byte the same for the same key."""
        if self.packed is not None:
            return self.packed
        packed, digest = io.BytesIO(), hashlib.sha256()
        # Level 1: the network is fast, and the launch waits for the compression.
        with (
            gzip.GzipFile(
                fileobj=packed, mode="wb", filename="", compresslevel=1, mtime=0
            ) as zipped,
            tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT) as tar,
        ):
            for member, content, line in _members(self.files):
                digest.update(line)
                tar.addfile(member, io.BytesIO(content))
        if digest.hexdigest() != self.key:
            # The host would keep wrong files under this key.
            folder = os.path.commonpath([file.parent for file in self.files.values()])
            raise LaunchError(
                f"files below {folder} changed while they were being packed for the hosts; launch "
                "again when nothing writes there"
            )
        return packed.getvalue()


@dataclass(frozen=True)
class Shipment:
    """What a program needs on its hosts."""

    trees: tuple[Tree, ...]  # in the order of `sys.path`; the last is our own
    requires: Mapping[str, str]  # versions of the distributions that are not sent


@_explained()
def pack_up(executables: Sequence[Executable], *, is_installed: bool = False) -> Shipment:
    """Returns the code that the nodes of a program need on other hosts, the same for all hosts.

    Modules that are found at run time only (`importlib.import_module(name)`) are sent if they are
    in the same package as one that is imported. Call it from one thread at a time, because it
    silences warnings while it parses sources. Where this package `is_installed`, perhaps for
    another platform, its code is sent all the same, so that both sides have the same version; its
    dependencies are not.
    """
    mentioned = set(_strings(pickled()))
    for each in executables:
        # Handles are pickled beside the work; their classes may be the user's.
        mentioned.update(_strings(each.work.data), _strings(dumps(each.work.handles)))
    used, others = mentioned & sys.modules.keys(), set[str]()
    search = _ImportSearch()
    if not mentioned.isdisjoint(SCRIPT_NAMES):
        others = search.place_script()
        # A script may import much for the launch only (plots, experiment trackers). The strings of code
        # that is pickled by value name what it uses. In a notebook, without source, any may name a module.
        candidates = others or mentioned
        used |= {n for n in candidates if not mentioned.isdisjoint((n, n.rpartition(".")[2]))}
    search.follow(used, is_needed=True)
    search.follow(others, is_needed=False)
    requires = search.distributions()
    if is_installed:
        requires |= {name: importlib.metadata.version(name) for name in _DEPENDENCIES}
    runtime = runtime_tree(_OURS if is_installed else _RUNTIME)
    return Shipment((*_user_trees(search.files), runtime), dict(sorted(requires.items())))


@_explained()
def runtime_tree(packages: Sequence[str] = _RUNTIME) -> Tree:
    """Returns what an agent needs, as it is installed here: psutil is compiled for one platform."""
    files = dict[str, Path]()
    for name in packages:
        # Without importing them: absl and psutil are loaded where they are used.
        spec = importlib.util.find_spec(name)
        assert spec is not None, f"{name} is a dependency of this package"
        assert spec.origin is not None, f"{name} is a regular package"
        for path, file in _files_in(Path(spec.origin).parent):
            if "tests" not in path.split("/"):
                files[f"{name}/{path}"] = file
    return _tree(files)


def _strings(data: bytes) -> Iterator[str]:
    """Yields all strings of a pickle that may name modules, without loading it."""
    texts = (text for _, text, _ in pickletools.genops(data) if isinstance(text, str))
    return (text for text in texts if text.replace(".", "_").isidentifier())


class _Module(NamedTuple):
    """Where a module is. A namespace package has no file; a module that is no package, no folders."""

    file: Path | None
    folders: Sequence[str]
    is_installed: bool


class _ImportSearch:
    """Follows imports, and collects the files of the modules, by root folder and path below it."""

    def __init__(self) -> None:
        self.files: dict[Path, dict[str, Path]] = {}
        self._find = functools.cache(self._locate)
        self._followed: set[str] = set()
        self._placed: dict[str, Path] = {}
        #: Files of installed packages, with the outermost names of their modules.
        self._required: dict[Path, str] = {}

    def place_script(self) -> set[str]:
        """Adds the script: children of `multiprocessing` import it. Returns what it imports."""
        main = sys.modules["__main__"]
        file = Path(getattr(main, "__file__", None) or "").absolute()
        if not file.is_file():  # a notebook, or `python < script`
            return set()
        imports = set(_imports_of(file, main.__package__ or ""))
        if (spec := main.__spec__) is not None:
            return {spec.name, *imports}
        if file.suffix == ".py":
            # A separate tree, so that a change of the script does not send the files beside it again.
            self.files[file] = {file.name: file}
        return imports

    def follow(self, names: Iterable[str], *, is_needed: bool) -> None:
        """Adds the user's modules, and what these import; unless needed, they require nothing."""
        unread = sorted(names)
        while unread:
            # Python imports the parent packages of a module before the module.
            for name in itertools.accumulate(unread.pop().split("."), "{}.{}".format):
                module = self._find(name)
                if module is None or module.file is None:
                    continue
                if module.is_installed:
                    # An import inside a function, or one that may fail, is often of an optional package. To
                    # refuse a host for a package that its nodes do not use is worse than an ImportError in
                    # a node. So a package is required only if this process has imported it.
                    if is_needed and name in sys.modules:
                        self._required[module.file] = name.partition(".")[0]
                    break
                if name not in self._followed:
                    self._followed.add(name)
                    self._place(name, module)
                    package = name if module.folders else name.rpartition(".")[0]
                    unread += _imports_of(module.file, package)

    def distributions(self) -> dict[str, str]:
        found = itertools.starmap(_distribution_of, self._required.items())
        return {each.metadata["Name"]: each.version for each in found if each is not None}

    def _locate(self, name: str) -> _Module | None:
        """Returns where a module is; None if it is neither sent nor required."""
        top = name.partition(".")[0]
        if name in SCRIPT_NAMES or top in _RUNTIME:
            return None
        file: object
        if (loaded := sys.modules.get(name)) is not None:
            file, found = getattr(loaded, "__file__", None), getattr(loaded, "__path__", None)
        else:
            spec = self._spec(name)
            file = spec.origin if spec and spec.has_location else None
            found = spec and spec.submodule_search_locations
        folders = [str(folder) for folder in found or ()]
        if not isinstance(file, str):
            return _Module(None, folders, is_installed=False) if folders else None
        path = Path(file).absolute()
        is_installed = not _INSTALLED.isdisjoint(path.parts)
        if not path.is_file() or (str(path).startswith(_STDLIB) and not is_installed):
            return None
        return _Module(path, folders, is_installed and top != _COMPAT)

    def _spec(self, name: str) -> importlib.machinery.ModuleSpec | None:
        parent, _, last = name.rpartition(".")
        if parent:
            # As a top-level module: otherwise Python imports its parents, and no code of the user may run.
            package = self._find(parent)
            return package and importlib.machinery.PathFinder.find_spec(last, package.folders)
        try:
            return importlib.util.find_spec(name) if name else None
        except (ImportError, ValueError):  # a module without spec, or a finder that objects
            return None

    def _place(self, name: str, module: _Module) -> None:
        """Adds the files of a module of the user, at the path that its name says."""
        file = module.file
        assert file is not None
        parts = tuple(name.split("."))
        package = parts if module.folders else parts[:-1]
        last = file.name if module.folders else parts[-1] + "".join(file.suffixes)
        place = "/".join((*package, last))
        if self._placed.get(place) == file:  # its package has placed it
            return
        root, new = file.parent, {place: file}
        is_in_package = bool(package) and file.parent.parts[-len(package) :] == package
        if is_in_package:
            root = file.parent.parents[len(package) - 1]
        if is_in_package or module.folders:
            # In a namespace package other modules and data lie beside it; at the top, any file may.
            for path, each in _files_in(file.parent, deep=bool(module.folders)):
                new.setdefault("/".join((*package, path)), each)
        self.files[root] = new | self.files.get(root, {})
        self._placed |= new


def _imports_of(file: Path, package: str) -> Iterator[str]:
    """Yields the names that a source may import at any time."""
    if file.suffix != ".py":
        return
    source = file.read_bytes()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the import itself shows them
            tree = ast.parse(source)
    except (SyntaxError, ValueError):  # the import itself raises it
        return
    for node in _walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: 1 - node.level or None] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            yield from (base, *(f"{base}.{alias.name}" for alias in node.names))


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    """Yields all nodes of a tree, except those for type checkers only."""
    yield node
    children = ast.iter_child_nodes(node)
    if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
        children = iter(node.orelse)
    for child in children:
        yield from _walk(child)


# Not `packages_distributions`: it reads the names of all files of all distributions (100 ms and more), does
# not know newer wheels on Python 3.10, and finds several for `google`.
def _distribution_of(file: Path, package: str) -> importlib.metadata.Distribution | None:
    """Returns the distribution that installed this file, if that is recorded."""
    site = next(folder for folder in file.parents if folder.name in _INSTALLED)
    line = f"\n{file.relative_to(site).as_posix()},"
    here = [str(site)]
    namesake = importlib.metadata.distributions(name=package, path=here)
    for each in itertools.chain(namesake, importlib.metadata.distributions(path=here)):
        record = each.read_text("RECORD")
        # Distributions of the operating system have no records.
        tops = "" if record else (each.read_text("top_level.txt") or "")
        if line in f"\n{record}" or package in tops.split():
            return each
    return None


def _user_trees(roots: Mapping[Path, Mapping[str, Path]]) -> list[Tree]:
    """Returns a tree for each root, so that a change of a script does not send a library again."""
    sizes = Counter[Path]()
    for file in {file for files in roots.values() for file in files.values()}:
        sizes[file.parent] += file.stat().st_size
    if sizes.total() > _MAX_BYTES:
        biggest = "".join(
            f"\n  {size / 1e6:.1f} MB in {folder}"
            for folder, size in sizes.most_common(5)
            if size > _MAX_BYTES / 100
        )
        raise LaunchError(
            f"the code that nodes import is {sizes.total() / 1e6:.0f} MB with all that lies beside "
            f"it, and at most {_MAX_BYTES / 1e6:.0f} MB are sent to hosts. Move data out of the "
            f"packages, to where hosts can read or download it. The biggest folders:{biggest}"
        )
    order = {Path(folder).absolute(): index for index, folder in reversed([*enumerate(sys.path)])}
    ranked = sorted(roots, key=lambda root: (order.get(root, len(order)), root))
    return [_tree(roots[root]) for root in ranked]


def _tree(files: Mapping[str, Path]) -> Tree:
    digest = hashlib.sha256()
    for _, _, line in _members(files):
        digest.update(line)
    return Tree(digest.hexdigest(), dict(files))


def _members(files: Mapping[str, Path]) -> Iterator[tuple[tarfile.TarInfo, bytes, bytes]]:
    """Yields the members of an archive, their content, and what the key says of each."""
    for name, path in sorted(files.items()):
        content = path.read_bytes()
        executable = bool(path.stat().st_mode & stat.S_IXUSR)
        member = tarfile.TarInfo(name)
        member.size = len(content)
        member.mode = 0o755 if executable else 0o644
        line = f"{name}\0{executable:d}\0{hashlib.sha256(content).hexdigest()}\n"
        yield member, content, line.encode(errors="surrogateescape")  # names need not be text


def _files_in(
    folder: Path, above: frozenset[str] = frozenset(), *, deep: bool = True
) -> Iterator[tuple[str, Path]]:
    """Yields the files of a package: their path below its folder, and where they are."""
    real = os.path.realpath(folder)
    if real in above:
        raise LaunchError(
            f"{folder} is a link to a folder that it is in ({real}), and would be sent to hosts for "
            "ever; remove the link, or move it out of the package"
        )
    with os.scandir(folder) as found:
        entries = sorted(filter(_may_travel, found), key=lambda each: each.name)
    for each in entries:
        if not each.is_dir():
            yield each.name, Path(each.path)
        elif deep:
            for path, file in _files_in(Path(each.path), above | {real}):
                yield f"{each.name}/{path}", file


def _may_travel(entry: "os.DirEntry[str]") -> bool:
    if entry.is_dir() and entry.name == "build":  # output of tools, unless it is a package
        return Path(entry.path, "__init__.py").exists()
    if entry.name == "__pycache__" or entry.name.startswith("."):
        return False
    if not entry.is_dir() and not entry.is_file():
        entry.stat()  # fails for a link to nothing; sockets and pipes have no content
        return False
    return not entry.name.endswith((".pyc", ".egg-info"))
