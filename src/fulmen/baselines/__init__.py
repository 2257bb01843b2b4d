"""What the benchmark lab compares with: algorithms of others, in our own words."""
