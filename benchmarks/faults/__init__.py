"""Files that are not what they should be: makers of mutants, the same for the same seed."""
