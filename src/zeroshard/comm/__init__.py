"""Communication: meshes of ranks, collectives, and transports.

Read `mesh` (ranks and their groups), `collectives` (every collective, labelled and counted), `transport` and
`shared_memory` (network and memory between ranks), then `hang_detector` and `heartbeat` (which end vain waits).
"""
