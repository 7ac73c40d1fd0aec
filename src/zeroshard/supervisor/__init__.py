"""The supervisor of a job: it starts the ranks, notices what goes wrong, says who is to blame, and starts them again.

One supervisor runs on each node. `records` are what it sees, `decision` decides over them (pure functions),
`processes` are those of the node, `worker` is their side, `node_coordination` connects the nodes, and `leader` puts
them together. `node` reads from the environment which node this is, and `crash` writes what happened into a report.
"""

from zeroshard.supervisor.decision import Limits
from zeroshard.supervisor.leader import Job, supervise
from zeroshard.supervisor.node import Node, find_place, set_threads

__all__ = ["Job", "Limits", "Node", "find_place", "set_threads", "supervise"]
