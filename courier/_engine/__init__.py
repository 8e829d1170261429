"""One engine for all carriers: frames, the handshake before them, and both halves of a connection.

`frames`, `handshake` and `segments` know no sockets that are not given to them; `carrier` turns
sockets into something that carries frames; `dialing`, `link` and `lane` are the client's half,
`poller`, `unproven` and `host` the server's.
"""
