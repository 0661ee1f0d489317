"""FP8 casts and matrix products: one interface for every device."""
