"""The listeners, HTTP and gRPC: bounds, routes, one exchange each, its times and its access-log line."""
