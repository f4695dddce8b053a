"""An experiment's folder: its files, checkpoints, attempts and metrics, and what a start decides from them."""
