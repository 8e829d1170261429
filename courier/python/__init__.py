"""Modules that programs of the original Launchpad import."""

import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, module_from_spec

# There, failing calls raise `StatusNotOk`. Here they may raise any exception.
if "pybind11_abseil" not in sys.modules and find_spec("pybind11_abseil") is None:
    for _name in ("pybind11_abseil", "pybind11_abseil.status"):
        sys.modules[_name] = module_from_spec(ModuleSpec(_name, None))
    vars(sys.modules["pybind11_abseil"])["status"] = sys.modules["pybind11_abseil.status"]
    vars(sys.modules["pybind11_abseil.status"])["StatusNotOk"] = Exception
