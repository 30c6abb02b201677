"""What the gateway costs: latency and CPU that it adds, how many streams it holds, what hostile input does to it."""
