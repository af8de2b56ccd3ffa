"""`narrowcast.netlab` under the name that benchmarks import: `from netlab import read`."""

from narrowcast.netlab import Counters, NetlabError, Network, read

__all__ = ["Counters", "NetlabError", "Network", "read"]
