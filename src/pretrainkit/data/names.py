"""Names of what our data tools write, to distinguish it from input, and unfinished work from finished data."""

from __future__ import annotations

import re

from pretrainkit.files import TEMPORARY_MARK

PACKED_RECORD = "packed.json"
"""In the folder of a packed dataset; it is complete once it has this name."""
SHARD_FILE = re.compile(r"shard-\d{5}\.(tar|json)")
"""A token shard or its record."""
STATE_SUFFIX = ".partial"
"""Of the folder of an unfinished preprocessing run."""
UNFINISHED_FOLDER = re.compile(
    rf".+{re.escape(STATE_SUFFIX)}|.+\.staging-[0-9a-f]{{16}}|.+{re.escape(TEMPORARY_MARK)}.+"
)
