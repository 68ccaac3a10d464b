"""What only a real Kubernetes API server can say. It runs where its programs are given (``make try-api-server``)."""
