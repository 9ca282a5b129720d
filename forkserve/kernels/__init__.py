"""Operators of the bundled engine: one file each, with its torch reference.

The KV layout they share: one layer is [2*Hk, rows, D] with K heads first; row ``page * P + slot``.
"""
