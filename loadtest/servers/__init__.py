"""Whole servers beside each other, as a client of OpenAI's API sees them."""
