"""Searches: a model decides what is tried, brokers pass it on, workers come and go."""
