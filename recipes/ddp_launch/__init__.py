"""DistributedDataParallel, started by a launcher."""
