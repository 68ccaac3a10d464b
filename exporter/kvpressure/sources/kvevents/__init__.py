"""KV events: what an engine reports of each block of its prefix cache. Needs the extra ``events``."""
