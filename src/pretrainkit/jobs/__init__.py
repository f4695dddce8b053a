"""Scheduler jobs: their scripts, submission and state, for Slurm, PBS and Grid Engine."""
