"""Inside the program under diagnosis: hooks that watch its loop, and what they have seen."""
