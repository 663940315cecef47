"""What goes beyond the paper, each plugged into the core from outside as a user's own would be."""
