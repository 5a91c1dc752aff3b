"""Sequences of different lengths in one call: padded with a mask, or packed end to end."""
