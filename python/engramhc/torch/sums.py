"""Whether sums may be added in an order that is not always the same."""

from __future__ import annotations

_allowed = False


def allow_nondeterministic(allowed: bool = True) -> bool:
    """Lets functions pick faster sums whose bits may differ from run to run; returns what it was.

    So far that is the dense gradient of `engram_gather`.
    """
    global _allowed
    before, _allowed = _allowed, bool(allowed)
    return before


def may_differ() -> bool:
    return _allowed
