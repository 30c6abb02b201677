"""gRPC made small: servers, channels, statuses, and domain values on the wire."""
