"""The supervisor of a job: it starts the ranks, detects failures, names the rank at fault, and restarts all ranks.

One supervisor runs on each node. `records` has its observations, `decision` decides over them (pure functions),
`processes` starts and ends the workers of a node, `worker` runs inside of them, `node_coordination` connects the nodes,
and `leader` is the loop. `node` reads from the environment which node this is, and `crash` writes crash reports.
"""

from zeroshard.supervisor.decision import Limits
from zeroshard.supervisor.leader import Job, supervise
from zeroshard.supervisor.node import Node, find_place, set_threads

__all__ = ["Job", "Limits", "Node", "find_place", "set_threads", "supervise"]
