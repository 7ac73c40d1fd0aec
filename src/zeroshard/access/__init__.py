"""Access to parameters by users: their reads and writes, and when the engine sees them.

Read `writes` (each write by the user), `editing` (whole parameters inside of `engine.gathered()`), then `given` (a
state dict in memory).
"""
