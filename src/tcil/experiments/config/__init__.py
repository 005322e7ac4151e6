"""What defines a run."""
