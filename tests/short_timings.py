"""Plans are timed by as few steps as there may be, once this is imported: no test compares times."""

from zeroshard.planner.predict import rehearse

rehearse.LEAST_SECONDS = 0.0
