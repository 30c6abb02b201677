"""Code shared by all Weft services."""
