"""The six services of the mesh; each one runs with python -m weft_services.<name>."""
