"""The original Launchpad imports its C++ code from here, and fails if files of ours replace it."""

raise ImportError(
    "dm-launchpad and launchpad-lite both have a package `courier`: files of one replace those of the other. "
    "Run: pip uninstall --yes dm-launchpad; pip install --force-reinstall --no-deps launchpad-lite"
)
