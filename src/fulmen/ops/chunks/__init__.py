"""What the operators that walk a state through chunks of tokens share."""
