"""Recomputation decided block by block within the device's budget: `recompute="auto"` (Rotor, 1911.13214).

Read `auto_recomputation`, `forwards` (states of a forward), `meter` (seconds and bytes of blocks), `ways` (to keep a
block: whole, its last tensors, without tensors that are `remade`, `stored` by savers, or its input alone) and
`decision` (the fastest ways within the `budget`). `dropping` frees kept blocks where room is short.
"""
