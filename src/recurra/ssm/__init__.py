"""State space models: discretisation, initial eigenvalues, and running a diagonal model over a sequence."""
