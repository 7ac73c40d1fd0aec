"""Memory: every long-lived byte on the ledger, host memory and a disk beside the device, and transfers between them.

Read `ledger` (accounts by tier and category, arenas), `host` and `disk` (slabs of exact size), `limits` (cgroups and
`ulimit`, asked before memory is taken), then `transfers` (copies and host jobs as tasks, with their executors).
"""

from zeroshard.memory.disk import Disk, Extent, SimulatedDisk
from zeroshard.memory.host import HostMemory, in_pages
from zeroshard.memory.limits import Room, find_rooms

__all__ = ["Disk", "Extent", "HostMemory", "Room", "SimulatedDisk", "find_rooms", "in_pages"]
