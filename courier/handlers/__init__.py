"""Where the original Launchpad looks for its code in C++, which it does not find among files of ours."""

raise ImportError(
    "dm-launchpad and launchpad-lite both have a package `courier`: files of one replace those of the other. "
    "Run: pip uninstall --yes dm-launchpad; pip install --force-reinstall --no-deps launchpad-lite"
)
