"""The running process: loop, workers, logging, memory tuning."""
