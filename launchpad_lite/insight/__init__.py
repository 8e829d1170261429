"""What a program shows of itself: numbers of nodes, what is kept of them, `top`, and the page."""

from launchpad_lite.insight import metrics

__all__ = ["metrics"]
