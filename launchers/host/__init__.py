"""The host agent: the one process on a host that supervises workers.

The launcher's side is `launchers.supervision.remote`. It reaches an agent by a pipe, ssh or srun.
"""
