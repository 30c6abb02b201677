"""What every Weft service stands on."""
