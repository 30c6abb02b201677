"""Drafts of the next tokens: where they come from, how many are worth verifying. No torch."""
