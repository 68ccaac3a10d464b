"""Both vendors' GPUs through everything above the sources: the real process, the page, the verdict."""
