"""Which code must be on a host that has nothing but Python. Starts and sends nothing.

What nodes refer to is read from their pickled work; what that imports is read from the sources of
the user's own modules, without running any. Only code that was not installed travels: installed
packages are named with their versions, for the host's own environment.
"""

import ast
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
import pkgutil
import stat
import sys
import sysconfig
import tarfile
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

from courier._definitions import SCRIPT_NAMES
from courier._parcel import dumps
from launchpad_lite._set_up import pickled
from launchpad_lite.errors import LaunchError
from launchpad_lite.launching import Executable

#: What an agent and its workers import, outside the standard library. Without grpc and protobuf:
#: our own clients do not need them.
_RUNTIME = ("absl", "cloudpickle", "courier", "launchers", "launchpad_lite", "psutil")
#: Our own, and the distributions that the others come in.
_OURS = ("courier", "launchers", "launchpad_lite")
_DEPENDENCIES = ("absl-py", "cloudpickle", "psutil")
#: Folders that stand for "installed", also in environments other than the one that runs.
_INSTALLED = frozenset(("site-packages", "dist-packages"))
#: Travels even if installed: launchpad-lite-compat, which is small, and part of our wheel as well.
_COMPAT = "launchpad"
_STDLIB = tuple(
    f"{folder}{os.sep}"
    for folder in (
        sysconfig.get_path("stdlib"),
        sysconfig.get_path("platstdlib"),
        Path(os.__file__).parent,
    )
)
#: Code is small. What is larger is data that happens to lie beside it, or a wrong folder.
_MAX_BYTES = 100_000_000
_SUBIMPORT = "cloudpickle.cloudpickle.subimport"


@dataclass(frozen=True)
class Tree:
    r"""A folder that is to be on the host's `sys.path`.

    Attributes:
        key: SHA-256, in hex, over `f"{path}\0{1 if executable else 0}\0{sha256 of content}\n"` of
            each file, sorted by path. The same files have the same key, whatever their times.
        files: Where each file is here, by its path below the folder (with slashes).
        size: Bytes in all files.
    """

    key: str
    files: Mapping[str, Path] = field(repr=False)
    size: int

    def archive(self) -> bytes:
        """Returns the files as `.tar.gz`, byte for byte the same for the same key.

        Raises:
            LaunchError: A file cannot be read, or is no longer what the key says.
        """
        packed, digest = io.BytesIO(), hashlib.sha256()
        # Level 1: hosts are near, and the launch waits for it.
        with (
            gzip.GzipFile(
                fileobj=packed, mode="wb", filename="", compresslevel=1, mtime=0
            ) as zipped,
            tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT) as tar,
        ):
            for name, path in sorted(self.files.items()):
                content, executable = _read(path), _is_executable(_status(path))
                digest.update(_line(name, executable, hashlib.sha256(content).hexdigest()))
                member = tarfile.TarInfo(name)
                member.size = len(content)
                member.mode = 0o755 if executable else 0o644
                tar.addfile(member, io.BytesIO(content))
        if digest.hexdigest() != self.key:
            # The host keeps it under this key for good.
            raise LaunchError(
                f"files below {_common_folder(self.files.values())} changed while they were being "
                "packed for the hosts; launch again when nothing writes there"
            )
        return packed.getvalue()


@dataclass(frozen=True)
class Shipment:
    """What a program needs on its hosts.

    Attributes:
        trees: In the order in which they are to stand on `sys.path`; the last is our own.
        requires: Distributions that nodes import and that are not in the trees: the version here, by
            name.
    """

    trees: tuple[Tree, ...]
    requires: Mapping[str, str]


def pack_up(executables: Sequence[Executable], *, is_installed: bool = False) -> Shipment:
    """Returns the code that the nodes of a program need on other hosts.

    Modules that are found at run time only (`importlib.import_module(name)`) travel if they are in
    the same package as one that is imported. Of files that did not change since the last time
    (their time and size did not) the hashes are remembered. For one thread at a time: parsing
    sources silences warnings.

    Args:
        executables: All that is to run anywhere; hosts share what they keep.
        is_installed: Whether this package is installed there, for another platform perhaps. It
            travels all the same, so that both sides are of one version; what it imports does not.

    Raises:
        LaunchError: A file cannot be read, links form a loop, or there is too much of it.
    """
    search = _Search()
    search.add_pickles([pickled(), *itertools.chain.from_iterable(map(_pickles, executables))])
    trees = _user_trees(search.files)
    runtime = runtime_tree(_OURS if is_installed else _RUNTIME)
    requires = {**search.requires, **(_versions(_DEPENDENCIES) if is_installed else {})}
    return Shipment((*trees, runtime), dict(sorted(requires.items())))


def _versions(distributions: Iterable[str]) -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in distributions}


def runtime_tree(packages: Sequence[str] = _RUNTIME) -> Tree:
    """Returns what an agent needs: our packages and what these import, as they are installed here.

    One of them is compiled (psutil), so the host must be of the same platform.

    Args:
        packages: Names of those.

    Raises:
        LaunchError: A file cannot be read.
    """
    files = dict[str, Path]()
    for name in packages:
        # Without importing them: absl and psutil are loaded where they are used.
        spec = importlib.util.find_spec(name)
        assert spec is not None, f"{name} is a dependency of this package"
        assert spec.origin is not None, f"{name} is a regular package"
        folder = Path(spec.origin).parent
        files |= {
            f"{name}/{path}": file
            for path, file in _files_below(folder)
            if "tests" not in path.split("/")
        }
    return _tree(files)


def _pickles(executable: Executable) -> tuple[bytes, bytes]:
    work = executable.work
    # Handles travel beside the work; their classes may be the user's.
    return work.data, dumps(work.handles)


@dataclass
class _Mentions:
    """What pickles speak of.

    Attributes:
        modules: Names that loading them imports.
        strings: All strings, among them what code that travels by value may import.
    """

    modules: set[str] = field(default_factory=set)
    strings: set[str] = field(default_factory=set)

    def read(self, data: bytes) -> None:
        """Adds what a pickle of protocol 4 or newer says, without loading it."""
        memo: list[str | None] = []
        # The two values pushed last, as far as they are strings or globals: all that is needed
        # to know the operands of STACK_GLOBAL and of a call with one argument.
        before: str | None = None
        last: str | None = None
        for opcode, argument, _ in pickletools.genops(data):
            name = opcode.name
            if name == "MEMOIZE":
                memo.append(last)
            elif name in {"BINGET", "LONG_BINGET"}:
                assert isinstance(argument, int)
                before, last = last, memo[argument]
            elif name in {"SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"}:
                assert isinstance(argument, str)
                self.strings.add(argument)
                before, last = last, argument
            elif name == "STACK_GLOBAL":
                assert before is not None
                self.modules.add(before)
                before, last = None, f"{before}.{last}"
            elif name == "TUPLE1" and before == _SUBIMPORT and last is not None:
                # How modules travel that are globals of functions pickled by value.
                self.modules.add(last)
                before = last = None
            elif name not in {"PROTO", "FRAME"}:
                before, last = last, None


@dataclass(frozen=True)
class _Module:
    """Where a module is.

    Attributes:
        file: None for a namespace package.
        search: Where its submodules are; None if it is no package.
        is_installed: Whether an installer put it there.
    """

    file: Path | None
    search: Sequence[str] | None
    is_installed: bool


@dataclass(frozen=True)
class _Import:
    """An import statement.

    Attributes:
        module: As written; may be empty after `from .`.
        names: What is imported from it; may be submodules.
        level: How many dots precede it.
        is_conditional: Whether importing the file may leave it out.
    """

    module: str
    names: tuple[str, ...]
    level: int
    is_conditional: bool

    def targets(self, package: str) -> list[str]:
        """Returns the names of all modules it may import, in a module of this package."""
        base = self.module
        if self.level:
            parts = package.split(".")
            above = parts[: max(0, len(parts) + 1 - self.level)]
            base = ".".join([*above, base] if base else above)
        return [base, *(f"{base}.{name}" for name in self.names if name != "*")]

    def is_among(self, strings: set[str]) -> bool:
        """Returns whether code that consists of these strings may contain it."""
        return self.module in strings if self.module else not strings.isdisjoint(self.names)


class _Search:
    """Follows imports from what pickles mention.

    Attributes:
        files: Of the user: by root folder, then by their path below it.
        requires: Versions by distribution.
    """

    def __init__(self) -> None:
        self.files: dict[Path, dict[str, Path]] = {}
        self.requires: dict[str, str] = {}
        self._placed: dict[str, Path] = {}
        self._known: dict[str, _Module | None] = {}
        #: Whether what a module imports is required, too.
        self._followed: dict[str, bool] = {}

    def add_pickles(self, pickles: Iterable[bytes]) -> None:
        mentions = _Mentions()
        for data in pickles:
            mentions.read(data)
        for name in sorted(mentions.modules):
            self._follow(name, is_needed=True, is_certain=True)
        # Classes and functions that travel by value name the module they are from. It travels too,
        # because they may import it in the end, but much of what it imports may be for the launch
        # only (plots, experiment trackers): the pickle says what they really use.
        for name in sorted(mentions.strings & sys.modules.keys()):
            if name in SCRIPT_NAMES:
                self._follow_main(mentions.strings)
            elif name not in mentions.modules and self._is_local(name):
                self._follow(name, is_needed=False, is_certain=True)
                self._follow_parts(sys.modules[name], mentions.strings)

    def _follow_main(self, strings: set[str]) -> None:
        main = sys.modules["__main__"]
        if getattr(main, "__file__", None):
            self._follow_parts(main, strings)
            self._place_main(main)
            return
        # A notebook has no source, but what its functions import is among the strings of their
        # code. A string may mean something else: what it finds travels, and requires nothing.
        for name in sorted(strings - sys.modules.keys()):
            if all(part.isidentifier() for part in name.split(".")):
                self._follow(name, is_needed=False, is_certain=False)

    def _place_main(self, main: ModuleType) -> None:
        """Adds the script itself: children that `multiprocessing` starts with `spawn` import it."""
        name = getattr(getattr(main, "__spec__", None), "name", None)
        file = Path(str(main.__file__)).absolute()
        if name is not None:
            self._follow(name, is_needed=False, is_certain=True)
        elif file.suffix == ".py" and file.is_file():
            # A separate tree, so that a change of the script does not send what lies beside it.
            self.files[file] = {file.name: file}

    def _follow_parts(self, module: ModuleType, strings: set[str]) -> None:
        """Follows the imports of a module of which parts travel by value."""
        file = getattr(module, "__file__", None)
        if not isinstance(file, str) or not Path(file).is_file():  # `python < script`
            return
        package = getattr(module, "__package__", None) or ""
        for each in _imports_of(Path(file).absolute()):
            is_needed, is_certain = each.is_among(strings), _is_loaded(each, package)
            for target in each.targets(package):
                self._follow(target, is_needed=is_needed, is_certain=is_certain)

    def _is_local(self, name: str) -> bool:
        found = self._find(name)
        return found is not None and found.file is not None and not found.is_installed

    def _follow(self, name: str, *, is_needed: bool, is_certain: bool) -> None:
        """Adds a module and what it imports.

        Args:
            name: Of the module.
            is_needed: Whether nodes use it; otherwise it only travels, and requires nothing.
            is_certain: Whether nodes surely import it, so that it is required if it is installed.
        """
        unread = [(name, is_needed, is_certain)]
        while unread:
            name, is_needed, is_certain = unread.pop()
            for each in _with_parents(name):
                module = self._find(each)
                if module is None or module.file is None:
                    continue
                if module.is_installed:
                    if is_needed and is_certain and self._require(module.file, each):
                        break  # its submodules are of the same distribution
                elif each not in self._followed or is_needed > self._followed[each]:
                    self._followed[each] = is_needed
                    self._place(each, module)
                    unread.extend(self._imports(each, module, is_needed))

    def _imports(
        self, name: str, module: _Module, is_needed: bool
    ) -> Iterator[tuple[str, bool, bool]]:
        assert module.file is not None
        package = name if module.search is not None else name.rpartition(".")[0]
        for each in _imports_of(module.file):
            # An import inside a function, or one that may fail, often stands for something
            # optional. Refusing a host for what its nodes would not use is worse than an
            # ImportError in a node, so these count only if this process, too, came by.
            is_certain = not each.is_conditional or _is_loaded(each, package)
            for target in each.targets(package):
                yield target, is_needed, is_certain

    def _find(self, name: str) -> _Module | None:
        """Returns where a module is; None if it neither travels nor is required."""
        if name not in self._known:
            self._known[name] = self._locate(name)
        return self._known[name]

    def _locate(self, name: str) -> _Module | None:
        if name in SCRIPT_NAMES or name.partition(".")[0] in _RUNTIME:
            return None
        file: object
        loaded = sys.modules.get(name)
        if loaded is not None:
            file, search = getattr(loaded, "__file__", None), getattr(loaded, "__path__", None)
        else:
            spec = self._spec(name)
            if spec is None:
                return None
            file = spec.origin if spec.has_location else None
            search = spec.submodule_search_locations
        folders = None if search is None else [str(folder) for folder in search]
        if not isinstance(file, str):
            return _Module(None, folders, is_installed=False) if folders else None
        path = Path(file).absolute()
        is_installed = not _INSTALLED.isdisjoint(path.parts)
        if not is_installed and str(path).startswith(_STDLIB):
            return None
        is_installed &= name.partition(".")[0] != _COMPAT
        return _Module(path, folders, is_installed) if path.is_file() else None

    def _spec(self, name: str) -> importlib.machinery.ModuleSpec | None:
        # `find_spec` imports the parents of a module; nothing of the user's is to run here.
        parent = name.rpartition(".")[0]
        if parent:
            package = self._find(parent)
            if package is None or package.search is None:
                return None
            return _spec_in(package.search, name)
        try:
            return importlib.util.find_spec(name) if name else None
        except (ImportError, ValueError):  # a module without spec, or a finder that objects
            return None

    def _require(self, file: Path, name: str) -> bool:
        found = _distribution_of(file, name.partition(".")[0])
        if found is not None:
            self.requires[found[0]] = found[1]
        return found is not None

    def _place(self, name: str, module: _Module) -> None:
        """Adds the files of a local module, at the path that its name says."""
        file = module.file
        assert file is not None
        parts = tuple(name.split("."))
        if module.search is not None:
            place = "/".join((*parts, file.name))
            parents, beside = parts, _files_below(file.parent)
        else:
            place = "/".join((*parts[:-1], parts[-1] + "".join(file.suffixes)))
            parents, beside = parts[:-1], _files_in(file.parent)
        if self._placed.get(place) == file:  # with the package that it is in
            return
        root = _root(file.parent, parents)
        files = self.files.setdefault(root or file.parent, {})
        # In a namespace package other modules and data lie beside it; at the top, anything may.
        if parents and (root is not None or module.search is not None):
            for path, each in beside:
                files.setdefault("/".join((*parents, path)), each)
        files[place] = file
        self._placed.update(files)


def _spec_in(folders: Sequence[str], name: str) -> importlib.machinery.ModuleSpec | None:
    """Finds a module in the folders of its package. `PathFinder` wants parents that are loaded."""
    parts = list[str]()
    for folder in folders:
        finder = pkgutil.get_importer(folder)
        spec = None if finder is None else finder.find_spec(name)
        if spec is not None and spec.loader is not None:
            return spec
        if spec is not None:
            parts += spec.submodule_search_locations or ()
    if not parts:
        return None
    namespace = importlib.machinery.ModuleSpec(name, None, is_package=True)
    namespace.submodule_search_locations = parts
    return namespace


def _is_loaded(each: _Import, package: str) -> bool:
    return each.targets(package)[0] in sys.modules


def _with_parents(name: str) -> Iterator[str]:
    """Yields what importing a module imports, the outermost package first."""
    return itertools.accumulate(name.split("."), lambda parent, child: f"{parent}.{child}")


def _root(folder: Path, parents: tuple[str, ...]) -> Path | None:
    """Returns the folder below which packages of these names are this folder; None if none is."""
    if not parents:
        return folder
    return folder.parents[len(parents) - 1] if folder.parts[-len(parents) :] == parents else None


def _imports_of(file: Path) -> tuple[_Import, ...]:
    if file.suffix in {".so", ".pyd", ".pyc"}:
        return ()
    status = _status(file)
    return _parse_imports(file, status.st_mtime_ns, status.st_size)


@functools.lru_cache(maxsize=1 << 14)
def _parse_imports(file: Path, mtime_ns: int, size: int) -> tuple[_Import, ...]:  # noqa: ARG001 - parts of the key
    source = _read(file)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the import shows them
            tree = ast.parse(source)
    except (SyntaxError, ValueError):  # as for warnings
        return ()
    return tuple(_imports_in(tree, is_conditional=False))


def _imports_in(node: ast.AST, is_conditional: bool) -> Iterator[_Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield _Import(alias.name, (), 0, is_conditional)
        elif isinstance(child, ast.ImportFrom):
            names = tuple(alias.name for alias in child.names)
            yield _Import(child.module or "", names, child.level, is_conditional)
        elif isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            yield from _imports_in(ast.Module(child.orelse, []), is_conditional)
        elif isinstance(child, ast.ClassDef | ast.With):  # run with what they are in
            yield from _imports_in(child, is_conditional)
        elif isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
            yield from _imports_in(child, is_conditional=True)


def _distribution_of(file: Path, package: str) -> tuple[str, str] | None:
    """Returns name and version of what was installed with this file, if that is recorded."""
    site = next(folder for folder in file.parents if folder.name in _INSTALLED)
    return _search_records(file, package, site, _status(site).st_mtime_ns)


# Rather than `packages_distributions`, which reads the names of all files of all distributions
# (100 ms and more), does not know newer wheels on Python 3.10, and names several for `google`.
@functools.lru_cache(maxsize=1 << 10)
def _search_records(file: Path, package: str, site: Path, mtime_ns: int) -> tuple[str, str] | None:  # noqa: ARG001 - part of the key
    line = f"\n{file.relative_to(site).as_posix()},"
    here = [str(site)]
    namesake = importlib.metadata.distributions(name=package, path=here)
    for each in itertools.chain(namesake, importlib.metadata.distributions(path=here)):
        record = each.read_text("RECORD")
        # Distributions of the operating system have no records.
        tops = "" if record else (each.read_text("top_level.txt") or "")
        if line in f"\n{record}" or package in tops.split():
            return each.metadata["Name"], each.version
    return None


def _user_trees(roots: Mapping[Path, Mapping[str, Path]]) -> list[Tree]:
    """Returns a tree for each root folder, in the order of `sys.path`.

    One for each, not one for all: a change of a script does not send a library again.
    """
    sizes = Counter[Path]()
    for file in {file for files in roots.values() for file in files.values()}:
        sizes[file.parent] += _status(file).st_size
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
    digest, size = hashlib.sha256(), 0
    for name, path in sorted(files.items()):
        status = _status(path)
        content = _content_hash(path, status.st_mtime_ns, status.st_size)
        digest.update(_line(name, _is_executable(status), content))
        size += status.st_size
    return Tree(digest.hexdigest(), dict(files), size)


def _line(name: str, executable: bool, content: str) -> bytes:
    # Names of files need not be text.
    return f"{name}\0{executable:d}\0{content}\n".encode(errors="surrogateescape")


@functools.lru_cache(maxsize=1 << 16)
def _content_hash(file: Path, mtime_ns: int, size: int) -> str:  # noqa: ARG001 - parts of the key
    return hashlib.sha256(_read(file)).hexdigest()


def _files_below(folder: Path, above: frozenset[str] = frozenset()) -> Iterator[tuple[str, Path]]:
    """Yields the files of a package: their path below its folder, and where they are."""
    real = os.path.realpath(folder)
    if real in above:
        raise LaunchError(
            f"{folder} is a link to a folder that it is in ({real}), and would be sent to hosts for "
            "ever; remove the link, or move it out of the package"
        )
    for each in _entries(folder):
        if not each.is_dir():
            yield each.name, Path(each.path)
        elif not _is_left_out(each):
            for path, file in _files_below(Path(each.path), above | {real}):
                yield f"{each.name}/{path}", file


def _files_in(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yields the files of a folder, without those in folders below it."""
    for each in _entries(folder):
        if not each.is_dir():
            yield each.name, Path(each.path)


def _entries(folder: Path) -> list["os.DirEntry[str]"]:
    """Returns the folders in a folder, and the files that travel."""
    try:
        with os.scandir(folder) as found:
            return sorted(filter(_may_travel, found), key=lambda each: each.name)
    except OSError as error:
        raise _unreadable(Path(error.filename or folder), error) from error


def _may_travel(entry: "os.DirEntry[str]") -> bool:
    if entry.name.startswith(".") or entry.name.endswith(".pyc"):
        return False
    if not entry.is_dir() and not entry.is_file():
        entry.stat()  # fails for a link to nothing; sockets and pipes have no content
        return False
    return True


def _is_left_out(folder: "os.DirEntry[str]") -> bool:
    """Returns whether a folder holds what tools have made, not code."""
    if folder.name == "build":
        return not Path(folder.path, "__init__.py").exists()
    return folder.name == "__pycache__" or folder.name.endswith(".egg-info")


def _status(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except OSError as error:
        raise _unreadable(path, error) from error


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> LaunchError:
    return LaunchError(
        f"{path} must be sent to the hosts, as nodes import what it is part of, and cannot be read "
        f"({error.strerror}); make it readable, or move it out of the package"
    )


def _is_executable(status: os.stat_result) -> bool:
    return bool(status.st_mode & stat.S_IXUSR)


def _common_folder(files: Iterable[Path]) -> str:
    return os.path.commonpath([file.parent for file in files])
