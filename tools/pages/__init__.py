"""The built pages of documentation: docs/results.md and docs/benchmarks.md. `python -m tools.pages --help`.

A page consists of sections, Markdown with Jinja expressions, which call functions for every number, table and figure.
What they show comes from JSON files in the repository, so that anyone can build a page again: summaries of runs for the
results, one record of a measurement for the benchmarks.
"""
