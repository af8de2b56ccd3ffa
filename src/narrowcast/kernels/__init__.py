"""The same operations on every machine; tensors and numbers only.

operations  every operation, declared once      arguments  what each may be given
contract    what a machine provides             layout     where bytes lie in a row
reference/  plain torch: what each operation means
cpu/  triton/  cuda/  the machines
operators/  the operations as torch operators, and the choice of a machine
"""
