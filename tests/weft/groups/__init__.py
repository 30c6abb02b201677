"""Groups of ranks that run one model together."""
