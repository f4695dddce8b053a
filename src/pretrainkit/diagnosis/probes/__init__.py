"""Changes that are tried inside the program, and the order in which they are measured."""
