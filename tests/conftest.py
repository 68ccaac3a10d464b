"""For every test: property tests draw the same examples each time, and a busy machine is no failure."""

from hypothesis import settings

settings.register_profile("kvpressure", deadline=None, derandomize=True)
settings.load_profile("kvpressure")
