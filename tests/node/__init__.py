"""The project on a node that runs its pods: a real kubelet and container runtime, with a stand-in for the GPU alone."""
