"""What a call is: its arguments checked and brought to one normal form, and the facts they make."""
