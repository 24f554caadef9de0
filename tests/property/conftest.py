"""Property tests draw the same examples on every run: `make test` a few, `make test-all` (marker slow)
many."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile(
    "few",
    deadline=None,
    derandomize=True,
    max_examples=12,
    database=None,
    suppress_health_check=list(HealthCheck),
)
settings.register_profile("many", parent=settings.get_profile("few"), max_examples=200)
settings.load_profile("few")
