"""Replicas: write one replica, train on many. After TF-Replicator (arXiv 1902.00465)."""
