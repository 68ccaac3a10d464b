"""Files of the node: /proc, cgroups, container logs."""
