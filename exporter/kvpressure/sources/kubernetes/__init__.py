"""The API server and the kubelet of this node."""
