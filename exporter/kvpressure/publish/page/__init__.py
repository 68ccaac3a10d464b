"""The triage page."""
