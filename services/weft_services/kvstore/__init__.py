"""The kvstore: runs the node's Mooncake Store, its disk tier, and the index of blocks in workers' pools."""
