"""Message classes of the wire, written by `protos/generate.py`; only courier imports them."""
