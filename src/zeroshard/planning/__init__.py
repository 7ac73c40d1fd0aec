"""Planning: the questions that the planner asks of each technique, and the settings that a technique offers.

Read `questions`, then `offers`; `tables` shows what was planned beside what was measured.
"""
