"""The APIs clients speak: each one's bodies into the one validated request, and answers into its own frames."""
