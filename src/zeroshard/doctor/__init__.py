"""The doctor: facts about this machine, its measured rates, and findings about its set-up.

Read `facts` (read from the system), `checkup` (findings from the facts), `measure` (rates, kept in a `profile`),
`presets` (cards by name) and `hardware` (devices and links, which the planner reads).
"""
