"""The HTTP APIs: each translates its bodies to the one validated request, and encodes answers in its own format."""
