"""Published language models of this field in transformers' own folders: one file an architecture."""
