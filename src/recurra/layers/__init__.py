"""Layers without time: embeddings, softmaxes, dropouts and the feed-forward network around the mixers."""

from recurra.layers.adaptive_embedding import AdaptiveEmbedding
from recurra.layers.adaptive_softmax import AdaptiveSoftmax
from recurra.layers.dropout import LockedDropout, WordDropout
from recurra.layers.feed_forward import FeedForward

__all__ = ["AdaptiveEmbedding", "AdaptiveSoftmax", "FeedForward", "LockedDropout", "WordDropout"]
