"""The kvstore service and the real Mooncake below it."""
