"""What a real API server would refuse in the objects of a run, found before it is asked. Pure.

Rules are those of Kubernetes 1.29 and later; where releases differ, the strictest holds. Three kinds
of checks: the structure, by the models of the official client where that is installed; rules about
single fields, as tables; and rules about fields that belong together, as functions.

`places` is what all rules are written in, and `values` what they say about one value. Above these
there is a module for each part of an object, up to `objects`, which takes whole ones.
"""

from launchers._kubernetes.checks.objects import mistakes

__all__ = ["mistakes"]
