"""The main job: a language model trained on text, from options to a run folder.

Read `config` (its options), `run` (the loop), then `gpt`, `folder` and `forecast`; the text comes from
`zeroshard.data`.
"""
