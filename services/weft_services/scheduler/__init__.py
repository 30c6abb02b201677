"""The scheduler: tracks the workers of the fleet and their load, and places every request."""
