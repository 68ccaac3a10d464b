"""vLLM: its series, arguments, limits, log lines and defaults."""
