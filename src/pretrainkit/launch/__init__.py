"""Starting a resolved run on this machine or through a scheduler."""
