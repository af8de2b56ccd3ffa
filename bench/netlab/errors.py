"""The one exception that netlab raises: the network asked for cannot be had. Its message ends with what to do."""


class NetlabError(Exception):
    """Says what is missing or wrong, and the line that fixes it."""
