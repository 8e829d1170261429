"""The kinds of nodes. Each describes a service; none knows a launcher."""
