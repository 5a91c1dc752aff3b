"""Programs for the repository itself; no part of the installed package."""
