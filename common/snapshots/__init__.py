"""What a run leaves to resume from, checked before it is used. Knows nothing of the run."""
