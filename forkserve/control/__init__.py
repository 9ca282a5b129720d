"""Control plane: what runs when, what is bound, what goes."""
