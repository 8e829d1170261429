"""Which code travels to hosts that have nothing but Python, and that it is enough there."""

import importlib
import importlib.metadata
import importlib.util
import io
import os
import pickle
import subprocess
import sys
import tarfile
import textwrap
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

import launchpad_lite as lp
from examples.consumer_producers.program import make_program
from launchers.hosts import shipping
from launchers.hosts.shipping import Shipment, Tree, pack_up, runtime_tree
from launchpad_lite.errors import LaunchError
from launchpad_lite.launching import Executable
from tests.launchers.scripts import Script

_ROOT = Path(__file__).parents[2]
_VERSION = "{}.{}".format(*sys.version_info)
#: The interpreter that the environment of these tests was made from.
_BARE_PYTHON = Path(sys.base_prefix, "bin", f"python{_VERSION}")

Project = Callable[[dict[str, str]], Path]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Project]:
    """Writes modules to a folder that is on sys.path until the end of the test."""
    before = set(sys.modules)

    def write(files: dict[str, str], folder: str = "project") -> Path:
        root = tmp_path / folder
        for name, text in files.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(textwrap.dedent(text))
        monkeypatch.syspath_prepend(root)
        importlib.invalidate_caches()
        return root

    yield write
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def plan_of(program: lp.Program) -> tuple[Executable, ...]:
    return tuple(lp.plan(program, "test_mp").executables)


def ship(*nodes: Any) -> Shipment:
    """Packs a program with a node for each class."""
    program = lp.Program("shipped")
    for index, node in enumerate(nodes):
        program.add_node(lp.CourierNode(node), label=f"node{index}")
    return pack_up(plan_of(program))


def user_files(shipment: Shipment) -> set[str]:
    return {name for tree in shipment.trees[:-1] for name in tree.files}


def load(name: str) -> Any:
    return importlib.import_module(name)


def unpack(trees: list[bytes], folder: Path) -> list[str]:
    folders = []
    for index, archive in enumerate(trees):
        folders.append(str(folder / f"tree{index}"))
        with tarfile.open(fileobj=io.BytesIO(archive), mode="r:gz") as tar:
            for member in tar:
                path = Path(folders[-1], member.name)
                path.parent.mkdir(parents=True, exist_ok=True)
                content = tar.extractfile(member)
                assert content is not None
                path.write_bytes(content.read())
    return folders


def run_bare(script: str, folders: list[str], stdin: bytes = b"") -> str:
    """Runs a script where nothing is installed and only these folders are there."""
    begin = f"import sys; sys.path[:0] = {folders!r}\n"
    done = subprocess.run(
        [str(_BARE_PYTHON), "-I", "-S", "-c", begin + textwrap.dedent(script)],
        input=stdin,
        capture_output=True,
        timeout=60,
        cwd="/",
    )
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode()


def empty(names: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), "")


#: The module of a class `Node`, the files that travel with it, and names of others beside them.
_IMPORTS = {
    "a module at the top travels alone": (
        "shp_alone",
        {"shp_alone.py": "class Node: ..."},
        "shp_other.py data.bin",
    ),
    "of a namespace package the folder of the module": (
        "shp_space.one.program",
        {"shp_space/one/program.py": "class Node: ...", "shp_space/one/config.toml": ""},
        "shp_space/one/runs/log.txt shp_space/two/program.py",
    ),
    "imports lead into namespace packages that are not loaded": (
        "shp_start",
        {
            "shp_start.py": "class Node:\n    def run(self):\n        import shp_far.in_.mod",
            "shp_far/in_/mod.py": "",
        },
        "",
    ),
    "imports are followed at any depth without running them": (
        "shp_a",
        {
            "shp_a.py": """
                class Node:
                    def run(self):
                        if True:
                            from shp_lib.part import thing
                """,
            "shp_lib/__init__.py": "raise RuntimeError('nobody may import this here')",
            "shp_lib/part.py": "from . import sibling\nfrom .. import above",
            "shp_lib/sibling.py": "try:\n    import shp_last\nexcept ImportError: pass",
            "shp_last.py": "import shp_a",
        },
        "shp_unrelated.py",
    ),
    "imports for type checkers are left out": (
        "shp_typed",
        {
            "shp_typed.py": """
                from typing import TYPE_CHECKING
                import typing as t
                if TYPE_CHECKING:
                    import shp_types, numpy
                if t.TYPE_CHECKING:
                    import shp_types
                else:
                    import shp_run_time
                class Node: ...
                """,
            "shp_run_time.py": "",
        },
        "shp_types.py",
    ),
    "a package travels whole from its top without what tools made": (
        "shp_pkg.inner.deep",
        {
            "shp_pkg/inner/deep.py": "class Node: ...",
            **empty(
                "shp_pkg/__init__.py shp_pkg/inner/__init__.py shp_pkg/inner/build/__init__.py"
            ),
            **empty("shp_pkg/unused.py shp_pkg/inner/data/table.csv"),
        },
        (
            "shp_pkg/.hidden shp_pkg/.git/config shp_pkg/build/lib.py shp_pkg/stale.pyc "
            "shp_pkg/shp_pkg.egg-info/PKG-INFO shp_pkg/__pycache__/unused.cpython-311.pyc"
        ),
    ),
}


class TestUserCode:
    @pytest.mark.parametrize("case", _IMPORTS)
    def test_what_travels(self, case: str, project: Project) -> None:
        module, files, others = _IMPORTS[case]
        project({**files, **empty(others)})
        load("numpy")
        shipment = ship(load(module).Node)
        assert user_files(shipment) == set(files)
        assert shipment.requires == {}
        assert "shp_lib" not in sys.modules

    def test_each_root_has_its_tree_in_the_order_of_the_path(self, project: Any) -> None:
        library = project({"shp_lib2/__init__.py": ""}, folder="library")
        script = project({"shp_user.py": "import shp_lib2\nclass Node: ..."}, folder="script")
        first, second, ours = ship(load("shp_user").Node).trees
        assert dict(first.files) == {"shp_user.py": script / "shp_user.py"}
        assert dict(second.files) == {"shp_lib2/__init__.py": library / "shp_lib2/__init__.py"}
        assert ours == runtime_tree()

    def test_a_module_lies_where_its_name_says_not_where_its_file_lies(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        file = tmp_path / "source" / "some-file.py"
        file.parent.mkdir()
        file.write_text("class Node: ...")
        (file.parent / "beside.py").write_text("")
        spec = importlib.util.spec_from_file_location("shp_ns.named", file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, "shp_ns", types.ModuleType("shp_ns"))
        monkeypatch.setitem(sys.modules, "shp_ns.named", module)
        spec.loader.exec_module(module)
        (tree, _) = ship(module.Node).trees
        assert dict(tree.files) == {"shp_ns/named.py": file}

    def test_this_very_module_is_found_below_its_root(self) -> None:
        (tree, _) = ship(ThisNode).trees
        assert tree.files["tests/launchers/test_shipping.py"] == Path(__file__)
        assert tree.files["tests/launchers/scripts.py"].is_file()

    def test_what_is_ours_or_python_s_is_no_user_code(self) -> None:
        shipment = ship(io.BytesIO)
        assert len(shipment.trees) == 1
        assert shipment.requires == {}

    def test_links_are_followed_and_their_loops_refused(self, project: Project) -> None:
        root = project({"shp_links/__init__.py": "class Node: ...", "elsewhere/data.txt": "abc"})
        (root / "shp_links/data").symlink_to(root / "elsewhere")
        node = load("shp_links").Node
        shipment = ship(node)
        assert user_files(shipment) == {"shp_links/__init__.py", "shp_links/data/data.txt"}
        with tarfile.open(fileobj=io.BytesIO(shipment.trees[0].archive())) as tar:
            assert all(member.isfile() for member in tar)
        (root / "elsewhere/back").symlink_to(root / "shp_links")
        with pytest.raises(LaunchError, match=r"back is a link to a folder that it is in"):
            ship(node)

    @pytest.mark.parametrize(
        ("link", "why"), [("nowhere", "No such file"), ("me", "symbolic links")]
    )
    def test_a_file_that_cannot_be_read_is_named(
        self, project: Project, link: str, why: str
    ) -> None:
        root = project({"shp_bad/__init__.py": "class Node: ..."})
        (root / "shp_bad/me").symlink_to(link)
        with pytest.raises(LaunchError, match=rf"shp_bad/me .*{why}.*move it out"):
            ship(load("shp_bad").Node)

    def test_pipes_and_sockets_are_left_out(self, project: Project) -> None:
        root = project({"shp_pipe/__init__.py": "class Node: ..."})
        os.mkfifo(root / "shp_pipe/pipe")
        assert user_files(ship(load("shp_pipe").Node)) == {"shp_pipe/__init__.py"}

    def test_too_much_is_refused_before_it_is_read(self, project: Project) -> None:
        root = project({"shp_big/__init__.py": "class Node: ...", "shp_big/weights/note": ""})
        with (root / "shp_big/weights/model.bin").open("wb") as file:
            file.truncate(3_000_000_000)
        with pytest.raises(LaunchError, match=r"3000 MB(.|\n)*3000\.0 MB in .*shp_big/weights\Z"):
            ship(load("shp_big").Node)


#: The source of `shp_node`, where `make` returns a class, and what that requires.
_REQUIRED = {
    "what local modules import": (
        """
        import json, os.path
        import absl.flags, courier, psutil
        class Node:
            from numpy.random import default_rng
        """,
        {"numpy"},
    ),
    "one distribution of a namespace": (
        "from google.protobuf import message\nclass Node: ...",
        {"protobuf"},
    ),
    "what those import that are not loaded here": (
        """
        class Node:
            def run(self):
                import shp_used
        """,
        {"numpy"},
    ),
}


class TestRequires:
    @pytest.mark.parametrize("case", _REQUIRED)
    def test_what_is_imported_is_required_in_the_version_here(
        self, case: str, project: Project
    ) -> None:
        source, names = _REQUIRED[case]
        project({"shp_node.py": source, "shp_used.py": "import numpy"})
        shipment = ship(load("shp_node").Node)
        assert shipment.requires == {name: importlib.metadata.version(name) for name in names}
        assert user_files(shipment) == {"shp_node.py", *(["shp_used.py"] * ("not loaded" in case))}

    def test_what_may_be_left_out_is_required_if_it_is_loaded_here(
        self, project: Project, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        project({"shp_maybe.py": "class Node:\n    def run(self):\n        import pluggy"})
        node = load("shp_maybe").Node
        assert set(ship(node).requires) == {"pluggy"}
        monkeypatch.delitem(sys.modules, "pluggy")
        assert ship(node).requires == {}

    def test_what_a_pickle_names_is_required(self) -> None:
        numpy = load("numpy")
        program = lp.Program("arrays")
        program.add_node(lp.CourierNode(io.BytesIO, numpy.zeros(3)), label="node")
        assert set(pack_up(plan_of(program)).requires) == {"numpy"}


class ThisNode:
    """A class of a module that pytest has imported in its own way."""


class TestTrees:
    def test_keys_and_archives_depend_on_names_contents_and_modes_alone(
        self, tmp_path: Path
    ) -> None:
        def tree(folder: str, content: str = "x", name: str = "a.py", mode: int = 0o640) -> Tree:
            file = tmp_path / folder / name
            file.parent.mkdir()
            file.write_text(content)
            file.chmod(mode)
            (tmp_path / folder / "b.txt").write_text("b")
            os.utime(file, (len(folder), len(folder)))
            return shipping._tree(dict(reversed([*shipping._files_in(file.parent)])))

        one = tree("one")
        assert (one.key, one.archive()) == ((same := tree("other")).key, same.archive())
        others = [tree("2", content="y"), tree("3", name="c.py"), tree("4", mode=0o740)]
        with tarfile.open(fileobj=io.BytesIO(others[2].archive())) as tar:
            member = tar.getmember("a.py")
        assert (member.mode, member.mtime, member.uid, member.uname) == (0o755, 0, 0, "")
        assert len({one.key, *(each.key for each in others)}) == 4

    def test_a_file_that_changed_since_is_not_sent_under_the_old_key(
        self, project: Project
    ) -> None:
        root = project({"shp_race.py": "class Node: ..."})
        tree = ship(load("shp_race").Node).trees[0]
        (root / "shp_race.py").write_text("class Edon: ...")
        with pytest.raises(LaunchError, match="changed while they were being packed"):
            tree.archive()


class TestOnABareHost:
    def test_no_tests_and_no_grpc_are_in_our_tree(self) -> None:
        files = runtime_tree().files
        assert not [name for name in files if "__pycache__" in name or "/tests/" in name]
        packages = {"absl", "cloudpickle", "courier", "launchers", "launchpad_lite", "psutil"}
        assert {name.split("/")[0] for name in files} == packages

    def test_the_agent_is_there_and_nodes_of_an_example_thaw(self, tmp_path: Path) -> None:
        executables = plan_of(make_program())
        shipment = pack_up(executables)
        assert shipment.requires == {}
        assert "examples/consumer_producers/program.py" in shipment.trees[0].files
        folders = unpack([tree.archive() for tree in shipment.trees], tmp_path)
        thaw = """
            import importlib.util, pickle
            assert importlib.util.find_spec("pytest") is None, "something is installed here"
            import launchers.host.agent, psutil
            print(launchers.__file__)
            print(psutil.__file__)
            from launchpad_lite.errors import UnresolvedAddressError
            for work in pickle.load(sys.stdin.buffer):
                try:
                    work.thaw()
                except UnresolvedAddressError:
                    print("has a handle")
                else:
                    print("has none")
            """
        works = cloudpickle.dumps([each.work for each in executables])
        lines = run_bare(thaw, folders, works).splitlines()
        assert all(file.startswith(folders[-1]) for file in lines[:2])
        assert len(lines[2:]) == len(executables)
        assert set(lines[2:]) == {"has a handle", "has none"}

    @pytest.mark.parametrize(
        "command",
        ["file", *(pytest.param(each, marks=pytest.mark.slow) for each in ("module", "text"))],
    )
    def test_nodes_of_a_script_thaw_and_find_what_they_import(
        self, tmp_path: Path, command: str
    ) -> None:
        folder = tmp_path / "script"
        (folder / "shp_helpers").mkdir(parents=True)
        (folder / "shp_helpers/__init__.py").write_text(
            "def help():\n    import shp_late\n    return shp_late.ANSWER"
        )
        (folder / "shp_late.py").write_text("import math\nANSWER = 42")
        (folder / "shp_own.py").write_text("OWN = 'own'")
        (folder / "shp_plots.py").write_text("import pluggy")
        script = Script(
            folder,
            """
            import pickle, sys
            import cloudpickle
            import pluggy  # for the launch only
            import shp_helpers
            import shp_plots
            import launchpad_lite as lp
            from launchers.hosts.shipping import pack_up

            class Node:
                def __init__(self):
                    from shp_own import OWN
                    print(shp_helpers.help(), OWN)

            program = lp.Program("script")
            program.add_node(lp.CourierNode(Node), label="node")
            executables = lp.plan(program, "test_mp").executables
            shipment = pack_up(executables)
            files = [name for tree in shipment.trees[:-1] for name in tree.files]
            archives = [tree.archive() for tree in shipment.trees]
            works = cloudpickle.dumps([each.work for each in executables])
            with open(sys.argv[1], "wb") as file:
                pickle.dump((files, dict(shipment.requires), archives, works), file)
            """,
        )
        found = tmp_path / "found.pickle"
        arguments = {
            "file": [str(script.path)],
            "module": ["-m", "script"],
            "text": ["-c", script.path.read_text()],
        }[command]
        with script:
            ended = script.run(str(found), command=[sys.executable, *arguments])
        assert ended.code == 0, ended.stderr
        files, requires, archives, works = pickle.loads(found.read_bytes())
        # Without its source nobody knows what the script imports for itself.
        own = {"shp_helpers/__init__.py", "shp_late.py", "shp_own.py"}
        assert set(files) == own | (set() if command == "text" else {"shp_plots.py", "script.py"})
        assert requires == {}
        construct = """
            import pickle
            (work,) = pickle.load(sys.stdin.buffer)
            work.thaw().constructor()
            """
        folders = unpack(archives, tmp_path)
        assert run_bare(construct, folders, works) == "42 own\n"
