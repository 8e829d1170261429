"""The host agent: the one process on a host that supervises workers.

`agent` and `worker` run on the host. `link` has the messages between them and the launcher, whose side is
`launchers.supervision.remote`. The launcher decides how it reaches an agent (a pipe, ssh, srun).
"""
