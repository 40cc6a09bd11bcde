"""`attn-dispatch bench --regret`: the time of the default over the best one, on drawn calls."""
