"""GPUs: one folder for each vendor."""
