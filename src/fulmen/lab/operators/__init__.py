"""What the lab knows of each operator: workloads to inspect, checks to verify, limits to reach."""
