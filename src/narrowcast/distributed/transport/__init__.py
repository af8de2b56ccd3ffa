"""How rows move between the ranks of a group.

wire          the contract; gloo, staged (CUDA over gloo) and nccl implement it
group         the ranks of a group: calls in one order, failures that raise on every rank
connections   their private connections, made anew after a failure; failures: what went wrong, written in the store
refusal       a rank that cannot make a call fails it, so that no other waits
hosts         who shares a host
agreement     what ranks must agree on before rows move
lane, work    what runs in order, off the caller's thread; what an asynchronous call returns
buffers       memory that is used again
gloo_connections, gloo_messages   all that calls gloo, and the behaviours of gloo that it leans on
nccl_guard    what NCCL has under way, looked after
"""
