"""The process of a script or a worker: signals, flags, logging, its end."""
