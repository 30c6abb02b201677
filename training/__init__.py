"""Code that makes the models which this repository carries. Nothing here runs when Weft serves."""
