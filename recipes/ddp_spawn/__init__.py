"""DistributedDataParallel, started by torch.multiprocessing."""
