"""Partitioning: blocks divided among stages and devices (PipeDream, Narayanan et al., SOSP 2019, section 3.1).

Read `measure` and `profile` (seconds and bytes of each block), `balance` (equal stages), `cluster` and `pipedream` (the
partitioner over levels of bandwidth); `simulated` plays its plan. For layers with branches and skips read `graph`,
`states` (the sets of layers that can stand before a cut) and `reading` (files of profiles).
"""
