"""What the two kinds of worker share."""
