"""A request on the mesh: tokens and keys made, placed, followed over workers, settled. Calls the other services."""
