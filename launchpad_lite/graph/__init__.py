"""Programs, as users describe them, and the arguments of nodes."""
