"""What only a real Kubernetes API server can say. Needs its programs (``make -C lab try-api-server``)."""
