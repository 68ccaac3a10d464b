"""The HTTP server: listening, TLS, authentication."""
