"""Scripts that drive a running mesh and print figures. No tests: nothing here passes or fails."""
