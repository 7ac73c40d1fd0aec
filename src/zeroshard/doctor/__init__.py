"""The doctor: what this machine has, what it can do, and what is wrong with its set-up.

Read `facts` (what is found), `checkup` (what is said of it), `measure` (rates, kept in a `profile`) and `hardware`
(devices and links, which the planner reads).
"""
