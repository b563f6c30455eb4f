"""Draft-block attention; the specification is `dflash_jax.block_attention` with "dense"."""
