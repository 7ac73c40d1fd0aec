"""The supervisor of a job: it starts the ranks, notices what goes wrong, says who is to blame, and starts them again.

One supervisor runs on each node. `records` are what it sees, `judge` decides over them (pure functions), `crew` are the
processes of the node, `worker` is their side, `board` connects the nodes, and `leader` puts them together. `place`
reads from the environment which node this is, and `crash` writes what happened into a report.
"""

from zeroshard.supervise.judge import Limits
from zeroshard.supervise.leader import Job, supervise
from zeroshard.supervise.place import Place, find_place, set_threads

__all__ = ["Job", "Limits", "Place", "find_place", "set_threads", "supervise"]
