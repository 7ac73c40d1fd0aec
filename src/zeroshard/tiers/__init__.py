"""Tiers below the device: host memory outside of torch's allocator, and files on a disk, both on the ledger."""

from zeroshard.tiers.disk import Disk, Extent
from zeroshard.tiers.host import HostMemory, in_pages
from zeroshard.tiers.imagined import ImaginedDisk
from zeroshard.tiers.room import Room, find_rooms

__all__ = ["Disk", "Extent", "HostMemory", "ImaginedDisk", "Room", "find_rooms", "in_pages"]
