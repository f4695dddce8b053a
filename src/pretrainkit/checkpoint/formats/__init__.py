"""One file per checkpoint format: how it lies on disk, read and written one tensor at a time."""
