"""score_mod and mask_mod: a user's function of one pair, as data that implementations read."""
