"""What training on large corpora takes: a generated corpus, its preparation, training on it, kills on the way."""
