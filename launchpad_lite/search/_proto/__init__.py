"""Message classes for workers in other languages, written by `protos/generate.py`."""
