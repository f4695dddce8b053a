"""Checkpoints: recognising them, converting between their formats, one tensor in memory at a time.

`convert` is the entry point. `mapping` spells out a family's weight table for one model, `transforms` has the layouts,
`formats` a reader and a writer per format, `open` recognises a format and chooses between them.
"""
