"""Diagnosis: from signals to a verdict with evidence. Pure; readable rules, no learned weights."""
