"""Access of users to parameters: their reads and writes, and how they reach the engine.

Read `writes` (each write by the user), `editing` (whole parameters inside of `engine.gathered()`), then `given` (a
state dict in memory).
"""
