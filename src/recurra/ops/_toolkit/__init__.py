"""The toolkit of all kernels: vectors, launching, source hashes, the fork guard, operators, backends, Triton tools."""
