"""The HTTP server: thousands of streams of a model side by side, and sessions that last."""
