"""Data: text and records on disk as rows of tokens, in one global order that any number of ranks share.

Read `files` and `sources` for documents and their blocks, `columns` and `tokenizer` for tokens, `order`, `packing` and
`readers` for rows, and `loader` for the batches of a rank. `corpus` is text in memory; `training` is both for the main
job.
"""
