"""Inside the process that is diagnosed: what is hooked, observed, replayed and switched."""
