"""`weft doctor`: what is checked, by subject."""
