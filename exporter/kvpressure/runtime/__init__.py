"""The running process: threads, intervals, deadlines and health of sources; logging and memory tuning."""
