"""How right is the verdict? Scores it on recordings of real servers and on reconstructed incidents.

``python -m lab.accuracy`` writes ``docs/reports/accuracy.md``; ``--check`` only says whether that file is up to date.
"""
