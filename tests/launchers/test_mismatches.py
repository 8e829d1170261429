"""What of a host must agree with where the program is launched, and what to do if it does not."""

import dataclasses

from launchers.hosts.arrival import Facts
from launchers.hosts.deployment import mismatches

_HERE = Facts((3, 11, 7), "CPython", "/py", ("linux", "x86_64", "glibc"))


def test_the_same_packages_and_another_patch_version_are_no_mistake() -> None:
    there = dataclasses.replace(_HERE, python=(3, 11, 2), packages={"numpy": "2.0"})
    assert not list(mismatches(_HERE, there, {"numpy": "2.0"}))


def test_another_minor_version_is_told_alone_with_what_to_do() -> None:
    there = dataclasses.replace(_HERE, python=(3, 12, 1))
    (mistake,) = mismatches(_HERE, there, {"numpy": "2.0"})
    assert mistake.startswith("/py is CPython 3.12.1, the program is launched by 3.11.7: ")
    assert "Name another interpreter, as in hosts=['h1:python=/path/to/python3.11']" in mistake


def test_another_platform_and_packages_are_told_together() -> None:
    packages = {"numpy": "1.9", "jax": None}
    there = dataclasses.replace(_HERE, platform=("linux", "aarch64", "glibc"), packages=packages)
    requires = {"numpy": "2.0", "jax": "0.4", "absl-py": "2.1"}
    platform, missing = mismatches(_HERE, there, requires)
    assert platform.startswith(
        "it is a linux-aarch64-glibc, the program is launched from a linux-x86"
    )
    assert (
        "needs numpy 2.0 (1.9 there), jax 0.4 (none there), absl-py 2.1 (none there) in /py"
        in missing
    )
    for advice in ("Install the same versions", "python=", "requirements='requirements.txt'"):
        assert advice in missing
