"""Published algorithms that fulmen's own operators are compared with."""
