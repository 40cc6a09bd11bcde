"""`attn-dispatch mask`: which queries of a call attend to which keys, as text or as a picture."""
