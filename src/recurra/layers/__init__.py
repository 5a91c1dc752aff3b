"""Layers without a state: embeddings, softmaxes, dropouts, attention and feed-forward networks."""

from recurra.layers.adaptive_embedding import AdaptiveEmbedding
from recurra.layers.adaptive_softmax import AdaptiveSoftmax
from recurra.layers.dropout import LockedDropout, WordDropout
from recurra.layers.feed_forward import FeedForward
from recurra.layers.short_convolution import ShortConvolution

__all__ = ["AdaptiveEmbedding", "AdaptiveSoftmax", "FeedForward", "LockedDropout", "ShortConvolution", "WordDropout"]
