"""The life of a program: messages, decisions, results. Without I/O."""
