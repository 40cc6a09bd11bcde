"""The checks of a call's arguments, their one normal form, and the types that hold it."""
