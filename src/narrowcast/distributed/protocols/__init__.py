"""What is sent to whom, and when. No threads, no sockets: protocols know the Wire contract alone.

pipeline    chunks through expect, send, receive and finish, several at a time
two_stage   all_reduce and reduce_scatter: parts to their owners, sums back
together    all_reduce where all rows leave together: over NCCL
one_way     all_gather, all_to_all, broadcast: rows that are not summed
mesh        all_reduce over hosts: exact within a host, in the codec between hosts
"""
