"""The HTTP and gRPC listeners: bounds, routes, access log, timings and the handling of each request."""
