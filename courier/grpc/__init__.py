"""gRPC: the front door of a server and the lane to it. Only this package imports grpc."""

import os

# grpc reads it at its import. By default it writes a line to standard error whenever a server ends
# with calls in flight, among the output of users' programs; errors still show.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
