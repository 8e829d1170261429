"""Where the original Launchpad looks for its code in C++, which it does not find among files of ours."""

raise ImportError(
    "dm-launchpad and launchpad-lite are both installed, and both have a package `courier`, whose files are "
    "mixed. To use launchpad-lite, run: pip uninstall --yes dm-launchpad; pip install --force-reinstall "
    "--no-deps launchpad-lite. To use dm-launchpad: pip uninstall --yes launchpad-lite; pip install "
    "--force-reinstall --no-deps dm-launchpad"
)
