"""Builds the packages of a commit, and makes releases of it.

    python .ci/release.py build                     # dist/: sdists and wheels of HEAD, with checksums
    python .ci/release.py release 0.2.0 [--dry-run]

Uploads and pushes nothing: it prints how. It works in worktrees of its own, so that files of this checkout that
are not committed have no part in it, and a release that fails leaves nothing.
"""

import argparse
import contextlib
import datetime as dt
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
VERSION_FILE = "launchpad_lite/_version.py"
VERSION_LINE = re.compile(r'^__version__ = "(.+)"$', re.MULTILINE)
COMPAT_FILE = "compat/pyproject.toml"
CHANGELOG = "CHANGELOG.md"
UNRELEASED = "## [Unreleased]\n"
SUMS = "SHA256SUMS"


def main() -> None:
    """Runs a command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("build", help="build the packages of HEAD into dist/")
    release = commands.add_parser(
        "release", help="make the commit and the tag of a release, and build it"
    )
    release.add_argument("version", help="as in 1.2.3, 1.2.3rc1")
    release.add_argument(
        "--dry-run", action="store_true", help="builds it, but makes no commit and no tag"
    )
    arguments = parser.parse_args()
    if arguments.command == "build":
        build("HEAD")
    else:
        make_release(arguments.version, is_dry_run=arguments.dry_run)


def make_release(version: str, *, is_dry_run: bool) -> None:
    """Writes the version and the changelog, builds, and then moves the branch and makes the tag."""
    tag = f"v{version}"
    check(version, git("tag", "--list", "v*").split())
    if git("status", "--porcelain", "--untracked-files=no"):
        sys.exit("there are changes that are not committed: commit them first")
    with worktree("HEAD") as folder:
        notes = write(folder, version)
        git("commit", "--quiet", "--all", "--message", f"release: {version}", folder=folder)
        commit = git("rev-parse", "HEAD", folder=folder)
    build(commit)
    if is_dry_run:
        print(f"A dry run: {tag} would have these notes:\n\n{notes}")
        return
    git("merge", "--quiet", "--ff-only", commit)
    git(
        "tag", "--annotate", "--cleanup=verbatim", "--message", f"{version}\n\n{notes}", tag, commit
    )
    branch = git("rev-parse", "--abbrev-ref", "HEAD")
    print(
        f"{tag} is made. Publish it:\n  git push origin {branch} {tag}\n"
        "  python -m twine upload dist/*.tar.gz dist/*.whl"
    )


def check(version: str, tags: list[str]) -> None:
    """Exits unless the version may follow the tags and the version of this checkout."""
    if not re.fullmatch(r"(0|[1-9]\d*)(\.(0|[1-9]\d*)){2}((a|b|rc)\d+)?", version):
        sys.exit(f"{version!r} is no version as in 1.2.3 or 1.2.3rc1")
    new = Version(version)
    newest = max((Version(tag[1:]) for tag in tags), default=None)
    if newest is not None and new <= newest:
        sys.exit(f"{version} does not follow {newest}, which is released")
    written = VERSION_LINE.findall(text(ROOT / VERSION_FILE))[0]
    if new < Version(written):
        sys.exit(f"{version} does not follow {written}, which {VERSION_FILE} says")


def write(folder: Path, version: str) -> str:
    """Writes the version where it stands; returns what the changelog says about it."""
    changelog = text(folder / CHANGELOG)
    before, _, rest = changelog.partition(UNRELEASED)
    notes = rest.partition("\n## [")[0].strip()
    if not notes:
        sys.exit(f"{CHANGELOG} has nothing under Unreleased")
    today = dt.datetime.now(dt.timezone.utc).date()
    changed = {
        CHANGELOG: f"{before}{UNRELEASED}\n## [{version}] - {today}\n{rest}",
        VERSION_FILE: VERSION_LINE.sub(f'__version__ = "{version}"', text(folder / VERSION_FILE)),
        COMPAT_FILE: re.sub(
            'launchpad-lite==[^"]+', f"launchpad-lite=={version}", text(folder / COMPAT_FILE)
        ),
    }
    for name, content in changed.items():
        (folder / name).write_text(content, encoding="utf-8")
    return notes


def build(commit: str) -> None:
    """Builds a commit twice, in different folders; compares, checks, and puts the files into dist/."""
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        for out, umask in ((first, 0o022), (second, 0o077)):
            with worktree(commit, umask) as folder:
                # The date of the commit stands for all files in the archives.
                date = git("log", "-1", "--format=%ct", commit)
                for package in (folder, folder / "compat"):
                    subprocess.run(
                        [sys.executable, "-m", "build", "--no-isolation", "--outdir", out, package],
                        env={**os.environ, "SOURCE_DATE_EPOCH": date}, check=True, umask=umask,
                        stdout=subprocess.DEVNULL,
                    )  # fmt: skip
        sums = [checksums(Path(out)) for out in (first, second)]
        if sums[0] != sums[1]:
            sys.exit(f"two builds of {commit} differ:\n{sums[0]}\n{sums[1]}")
        files = sorted(Path(first).iterdir())
        subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *files], check=True)
        dist = ROOT / "dist"
        shutil.rmtree(dist, ignore_errors=True)
        dist.mkdir()
        for file in files:
            shutil.copy(file, dist)
        (dist / SUMS).write_text(sums[0], encoding="utf-8")
    print(f"{dist}:\n{sums[0]}", end="")


def checksums(folder: Path) -> str:
    """Returns what sha256sum prints for the files of a folder."""
    sums = [
        (hashlib.sha256(path.read_bytes()).hexdigest(), path.name)
        for path in sorted(folder.iterdir())
    ]
    return "".join(f"{digest}  {name}\n" for digest, name in sums)


@contextlib.contextmanager
def worktree(commit: str, umask: int = -1) -> Iterator[Path]:
    """Makes a folder with the files of a commit, and nothing else; removes it at the end."""
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent, "launchpad-lite")
        git("worktree", "add", "--quiet", "--detach", str(folder), commit, umask=umask)
        try:
            yield folder
        finally:
            git("worktree", "remove", "--force", str(folder))


def text(path: Path) -> str:
    """Returns the text of a file."""
    return path.read_text(encoding="utf-8")


def git(*arguments: str, folder: Path = ROOT, umask: int = -1) -> str:
    """Runs git; returns what it prints. git says itself what has failed."""
    command = ["git", *arguments]
    done = subprocess.run(
        command, check=False, cwd=folder, stdout=subprocess.PIPE, text=True, umask=umask
    )
    if done.returncode != 0:
        sys.exit(done.returncode)
    return done.stdout.strip()


if __name__ == "__main__":
    main()
