"""One step: backwards add gradients up; then reduce, agree on losses and norms, decide, apply the update, end.

Read `sequence`, then `decision`, `backward`, `losses` and `context` (for code inside of models). The list of actions of
a step over one stage is `gradient_accumulation`; those over several stages are `zeroshard.pipeline.run.steps`.
"""
