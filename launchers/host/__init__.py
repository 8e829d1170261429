"""A host and the one process on it that supervises workers: the host agent.

`agent` and `worker` run there, `remote` is the launcher's side, `link` is what
passes between them. How an agent is reached (a pipe, ssh, srun) is up to the
launcher.
"""
