"""`attn-dispatch mask`: who attends to whom in a call, as text and as a picture."""
