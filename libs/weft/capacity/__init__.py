"""What a model takes, and what a machine could do with it at best: arithmetic on configs. No torch."""
