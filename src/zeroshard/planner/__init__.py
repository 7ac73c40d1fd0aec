"""The planner: know before you run."""
