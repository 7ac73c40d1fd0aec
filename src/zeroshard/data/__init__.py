"""Data: text and records on disk as rows of tokens, in one global order that any number of ranks share.

Text in memory is `corpus`. Read `tokenizer` for the way from text to tokens.
"""
