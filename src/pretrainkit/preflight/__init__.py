"""Checks of a node, or of all nodes of a job, before training starts."""
