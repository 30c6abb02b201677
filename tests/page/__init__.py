"""The page in a real browser, in front of a fleet that is made up."""
