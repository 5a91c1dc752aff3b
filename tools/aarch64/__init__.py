"""The Numba kernels as 64-bit ARM code: run under qemu's emulation, and looked at for what is not in vectors."""
