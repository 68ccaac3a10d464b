"""SGLang: its series, command line, log lines, limits and words."""
