"""Modules that programs of the original Launchpad import."""

import sys
from importlib.util import find_spec
from types import ModuleType

# Its `StatusNotOk` is what any call raises that fails. Here that may be any exception.
if find_spec("pybind11_abseil") is None:
    for _name in ("pybind11_abseil", "pybind11_abseil.status"):
        sys.modules[_name] = ModuleType(_name)
    vars(sys.modules["pybind11_abseil"])["status"] = sys.modules["pybind11_abseil.status"]
    vars(sys.modules["pybind11_abseil.status"])["StatusNotOk"] = Exception
