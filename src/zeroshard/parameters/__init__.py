"""Parameters in the user's hands: their reads and writes, and when the engine sees them.

Read `writes` (each write by the user), `editing` (whole parameters inside of `engine.gathered()`), then `given` (a
state dict in memory).
"""
