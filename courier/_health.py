"""Asking a server from outside whether it is well."""

from courier._address import split_address


def is_healthy(address: str, timeout_s: float) -> bool:
    """Asks the standard gRPC health service of a server, which takes no secret.

    A courier server answers it in threads of its own, so also while all its handlers are busy; a
    process that is stopped or stuck does not. What cannot be asked is not healthy: this raises
    nothing for servers. Each check makes a connection and leaves nothing behind; it takes about
    a millisecond on one machine, so it may run every second for as long as one likes.
    Thread-safe.

    Args:
        address: `host:port`, of any gRPC server that has the health service.
        timeout_s: Seconds that all of it may take. Where nobody listens, the answer comes at once.

    Returns:
        Whether the server says SERVING in time.

    Raises:
        ValueError: `address` is not host:port, or the timeout is not above 0.
    """
    split_address(address)
    if not timeout_s > 0:
        raise ValueError(f"a check needs more time than {timeout_s} s")
    from courier._grpc.health import ask  # grpc loads when it is first needed

    return ask(address, timeout_s)
