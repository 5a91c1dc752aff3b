"""State space models: discretisation, initial eigenvalues, and diagonal models over sequences."""
