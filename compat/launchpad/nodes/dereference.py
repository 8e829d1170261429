"""Arguments that are made in the node that uses them."""

from launchpad_lite import Deferred, Handle as Dereferenceable, maybe_dereference

__all__ = ["Deferred", "Dereferenceable", "maybe_dereference"]
