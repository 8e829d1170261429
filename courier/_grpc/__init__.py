"""The only room that knows grpc: the front door of a server and the lane to it."""
