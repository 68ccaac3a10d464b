"""AMD GPUs: sysfs, and the AMD SMI library where needed."""
