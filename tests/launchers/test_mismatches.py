"""What of a host must agree with where the program is launched, and what to do if it does not."""

import dataclasses

from launchers.hosts.arrival import Facts
from launchers.hosts.deployment import mismatches

_HERE = Facts((3, 11, 7), "CPython", "/py", ("linux", "x86_64", "glibc"))


def test_the_patch_version_may_differ() -> None:
    assert not list(mismatches(_HERE, dataclasses.replace(_HERE, python=(3, 11, 2)), {}))


def test_the_same_packages_are_no_mistake() -> None:
    there = dataclasses.replace(_HERE, packages={"numpy": "2.0"})
    assert not list(mismatches(_HERE, there, {"numpy": "2.0"}))


def test_another_minor_version_is_told_alone_with_what_to_do() -> None:
    there = dataclasses.replace(_HERE, python=(3, 12, 1))
    (mistake,) = mismatches(_HERE, there, {"numpy": "2.0"})
    assert mistake == (
        "/py is CPython 3.12.1, the program is launched by 3.11.7: code travels between the same "
        "minor versions only. Name another interpreter, as in "
        "hosts=['h1:python=/path/to/python3.11'], or python= for all hosts"
    )


def test_another_platform_and_packages_are_told_together() -> None:
    packages = {"numpy": "1.9", "jax": None}
    there = dataclasses.replace(_HERE, platform=("linux", "aarch64", "glibc"), packages=packages)
    requires = {"numpy": "2.0", "jax": "0.4", "absl-py": "2.1"}
    assert list(mismatches(_HERE, there, requires)) == [
        (
            "it is a linux-aarch64-glibc, the program is launched from a linux-x86_64-glibc; what "
            "is shipped would not run there"
        ),
        (
            "the program needs numpy 2.0 (1.9 there), jax 0.4 (none there), absl-py 2.1 (none there) "
            "in /py. Install the same versions there, name an interpreter that has them (python=), "
            "or let the launcher install them (requirements='requirements.txt')"
        ),
    ]
