"""Parameters in the user's hands: who may read and write them, and when that is seen.

Read `writes` (each write, where it happens), then `editing` (whole parameters inside of `engine.gathered()`).
"""
