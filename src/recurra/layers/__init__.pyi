from recurra.layers.convolution import ShortConvolution
from recurra.layers.dropout import LockedDropout, WordDropout
from recurra.layers.embeddings import AdaptiveEmbedding
from recurra.layers.experts import MixtureOfExperts, load_balancing_loss
from recurra.layers.feed_forward import FeedForward
from recurra.layers.softmax import AdaptiveSoftmax

__all__ = [
    "AdaptiveEmbedding",
    "AdaptiveSoftmax",
    "FeedForward",
    "LockedDropout",
    "MixtureOfExperts",
    "ShortConvolution",
    "WordDropout",
    "load_balancing_loss",
]
