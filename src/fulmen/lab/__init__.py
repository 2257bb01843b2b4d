"""Everything that measures or proves. It imports the rest; nothing imports it."""
