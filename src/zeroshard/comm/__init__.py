"""Communication: meshes of ranks, every collective, and the detection of ranks that hang or are gone.

Read `mesh` (ranks and their groups), `collectives` (every collective, labelled and counted, over the platform's
transports), then `hang_detector` and `heartbeat`.
"""
