"""What unit tests share: a wait that never ends is a failure within seconds, not within the two minutes that
users have."""

from __future__ import annotations

import os

os.environ.setdefault("TILESCALE_WAIT_TIMEOUT", "10")
