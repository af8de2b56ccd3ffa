"""What netlab raises. Messages end with what to do."""

from narrowcast.errors import CollectiveError, NarrowcastError


class NetlabError(NarrowcastError, RuntimeError):
    """The network asked for cannot be had: says what is missing or wrong, and the line that fixes it."""


class BrokenNetworkError(NetlabError, CollectiveError):
    """The network stopped while ranks were running."""
