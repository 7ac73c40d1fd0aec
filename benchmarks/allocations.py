"""The peak of memory in a profile: every allocation and release that torch has seen."""

from torch.profiler import profile


def highest(watched: profile) -> int:
    """The most bytes held at once in a profile that was made with `profile_memory=True`, above those at its start."""
    found: list[tuple[int, int]] = []
    pending = list(watched.profiler.kineto_results.experimental_event_tree())
    while pending:
        event = pending.pop()
        if event.name == "[memory]":
            found.append((event.start_time_ns, event.extra_fields.alloc_size))
        pending += event.children
    now = most = 0
    for _, change in sorted(found, key=lambda each: each[0]):
        now += change
        most = max(most, now)
    return most
