"""Diagnosis: three-valued facts, a table of rules for each verdict, hysteresis and conditions.

Pure; no learned weights.
"""
