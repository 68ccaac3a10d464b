"""Does kvpressure tell the truth on this NVIDIA GPU and driver? ``make test-gpu``; parts by ``python -m lab.gpu
--list``.

Needs a GPU, ``nvidia-smi``, and for most parts a Python with torch. Every part runs in a process of its own, writes
one JSON file, and says of everything that it could not ask why.
"""
