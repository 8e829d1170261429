"""Plans: makes the executables of a program, which launchers start."""
