"""The schedule: one training step as a list of actions per rank (the second backbone).

Read `actions` (the grammar), `layout` (chunks and microbatches of each rank), `orders` (the schedules of the
literature, compute only), `lower` (passes that add versions, updates and messages), `pipeline` (the complete lists),
then their consumers: `verify`, `simulate`, and the engine's executor.
"""

from zeroshard.schedule.actions import Action, Kind, Schedule
from zeroshard.schedule.layout import Layout
from zeroshard.schedule.lower import Loan, with_gathers, with_reductions, with_update
from zeroshard.schedule.orders import SCHEDULES, STREAMING
from zeroshard.schedule.pipeline import PipelineSchedule
from zeroshard.schedule.verify import verify

__all__ = [
    "SCHEDULES",
    "STREAMING",
    "Action",
    "Kind",
    "Layout",
    "Loan",
    "PipelineSchedule",
    "Schedule",
    "verify",
    "with_gathers",
    "with_reductions",
    "with_update",
]
