"""State space models: discretisation, initial eigenvalues, and diagonal models over sequences."""

from recurra.ssm.diagonal import DISCRETISATIONS, Discretised, bilinear, zero_order_hold

__all__ = ["DISCRETISATIONS", "Discretised", "bilinear", "zero_order_hold"]
