"""Hand-written kernels, one folder an operator: plain arrays, optional, exact.

Each has its specification in plain `jnp` elsewhere; a kernel is chosen by name or by
`resolve`-functions that say what they chose, and fails loudly where it cannot run.
"""
