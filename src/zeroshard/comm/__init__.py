"""Ranks: meshes of them, collectives, and how bytes get from one to another.

Read `mesh` (ranks and their groups), `collectives` (every collective, labelled and counted), `transport` and
`shared_memory` (how slices travel), then `hang_detector` and `heartbeat` (what ends a wait for a rank that is gone).
"""
