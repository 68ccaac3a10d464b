"""Publishing: metrics, JSON, the triage page and the web server. Renders only; no input here."""
