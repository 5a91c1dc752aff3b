"""The page docs/results.md: hand-written sections with numbers, tables and figures from summaries of runs.

docs/results/README.md says how to add a run or a section.
"""
