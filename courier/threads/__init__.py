"""Threads, timers, and forked children."""
