"""The command line: `main` finds the command, and each command has a file of its name.

Read `main`, `rank` (a rank of a training job), `train`'s options in `zeroshard.train.config`, then the commands.
"""
