"""What happened: what really ran, when, and why the ranks idled."""

from jaxpp.observe.profile import Profile
from jaxpp.observe.trace import to_perfetto

__all__ = ["Profile", "to_perfetto"]
