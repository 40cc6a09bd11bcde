"""score_mod and mask_mod, the user's functions of one pair, as data that implementations read."""
