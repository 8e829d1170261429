"""What the Kubernetes launcher is made of."""
