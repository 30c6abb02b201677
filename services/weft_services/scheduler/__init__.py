"""The scheduler: who is in the fleet, how loaded it is, and where the next request goes."""
