"""Publishing: metric declarations, const families, the web server and its page. Renders only; no input here."""
