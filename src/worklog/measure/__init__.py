"""What one case costs and whether its result is right: error, memory, time, energy; and the machine's ceilings."""
